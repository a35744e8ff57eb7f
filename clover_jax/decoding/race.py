"""`--tree=auto` and `--attention=auto`: time the candidates on this machine, use the fastest.

Candidate trees and plain decoding decode the run's own prompts, alternating. A choice is kept next
to the head, so that the next run reads it back instead of measuring again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import clover_jax
from clover_jax.checkpoints.base import checksum, lm_head_hash
from clover_jax.checkpoints.card import native_directory
from clover_jax.data.chat import encode_prompt
from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.cache_reading import cache_reader
from clover_jax.decoding.models import Models, cache_size, fitting_context, needs_no_file
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.requests import Request
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.tree_config import parse_tree, portable_name
from clover_jax.errors import UserError, reason_of
from clover_jax.models.attention import attend
from clover_jax.models.cache import KeyValue, read_with
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import process_count
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.files import atomic_file, read_json_object
from clover_jax.runtime.progress import passing_note, progress_bar, say
from clover_jax.runtime.row_writer import manifest_path
from clover_jax.runtime.turns import time_in_turns

PLAIN = "plain"
FILE = "trees.json"  # next to draft.json
TURNS = 5
# How many tokens copies and heads get accepted changes from prompt to prompt and along an answer.
FEWEST_TURNS = 2
FEWEST_TOKENS, MOST_TOKENS = 16, 128  # that a row of a turn emits
TURN_SECONDS = 8.0  # of plain decoding, about
FAR_BEHIND = 0.67  # of the fastest so far: such a tree gets no further turns

KERNELS = {"tpu": "pallas", "gpu": "cudnn"}  # platform -> the alternative to XLA's program
APART = {"float32": 1e-4, "bfloat16": 3e-2}  # rounding errors of values near 1


def check_one_process() -> None:
    """Raise UserError where several processes would measure: each could choose another tree."""
    if process_count() > 1:
        raise UserError(
            f"--tree=auto measures in one process, not in {process_count()}; name a tree, such as "
            "the one that --tree=auto chose in one process"
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of a race.

    name: of the tree, for `parse_tree`; PLAIN where speculation does not pay.
    rates: tokens a second of every candidate, over all its turns.
    path: the file that remembers the choice; None where it could not be written.
    """

    name: str
    rates: Mapping[str, float]
    path: Path | None

    def apply(self, models: Models) -> Models:
        return models.plain() if self.name == PLAIN else models.with_tree(parse_tree(self.name))

    def __str__(self) -> str:
        # Plain decoding comes first among the others: it is what a tree has to beat.
        others = sorted((name for name in self.rates if name != self.name), key=PLAIN.__ne__)
        figures = ", ".join(f"{name} {self.rates[name]:.1f}" for name in others)
        figures = f"{self.rates[self.name]:.1f} tokens/s" + (figures and f"; {figures}")
        chosen = "none, plain decoding" if self.name == PLAIN else self.name
        kept = "not remembered" if self.path is None else f"remembered in {self.path}"
        return f"tree: {chosen} ({figures}), {kept}"


def with_fastest_tree(
    models: Models,
    rows: Sequence[Prompt | BadPrompt],
    batch_size: int,
    settings: GenerationSettings,
    resumed: Path | None = None,
) -> Models:
    """Return the models with the tree of `fastest_tree`, or without the draft; print the choice.

    rows: the run's own prompts. Where none of them can be read, the draft's own tree stays.
    resumed: a row file; if it has rows already, their tree is used again.
    """
    # Another tree would be refused in a file that was begun.
    if resumed is not None and resumed.is_file() and resumed.stat().st_size:
        try:
            tree = parse_tree(read_json_object(manifest_path(resumed))["settings"]["tree"])
        except (UserError, KeyError, TypeError, AttributeError):
            pass  # the row writer reports what is wrong with the manifest
        else:
            say(f"tree: {tree.name}, which {resumed} was begun with")
            return models.with_tree(tree) if tree.num_nodes else models.plain()

    prompts: list[list[int]] = []
    wanted, vocabulary = TURNS * batch_size, models.base.config.vocab_size
    stride = max(1, len(rows) // wanted)
    # Evenly spread, since files of prompts are often sorted by task; then what lies between.
    for row in itertools.chain(*(rows[first::stride] for first in range(stride))):
        # A bad row fails by itself when its turn comes.
        with contextlib.suppress(UserError):
            if isinstance(row, Prompt) and len(prompts) < wanted:
                prompts.append(encode_prompt(row, models.tokenizer, vocabulary))
    if not prompts:
        return models
    choice = fastest_tree(models, prompts, batch_size, settings)
    say(str(choice))
    return choice.apply(models)


def fastest_tree(
    models: Models,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    settings: GenerationSettings,
) -> Choice:
    """Return the tree that decodes these prompts fastest, measured now or remembered.

    models: a base with a draft; the draft's own tree is one of the candidates.
    prompts: token ids; TURNS * batch_size of them are used at most.
    batch_size: rows decoded at once. settings: of the run; its answers are timed up to
        MOST_TOKENS tokens.
    Raises UserError where no tree suits the head and the rules.
    """
    # The rows that are timed have no form to match.
    sampling = dataclasses.replace(sampling_for(settings, []), masked=False)
    key = _key(models, batch_size, sampling, settings)
    places = _places(models)
    for path in places:
        for kept in _entries(path):
            if kept["key"] == key:
                return Choice(kept["tree"], kept["tokens_per_second"], path)

    # Compiling is not part of the race, and neither is the first pass of each way.
    ways = candidates(models, sampling)
    with CompileClock() as compiling, exact_matmuls(str(models.dtype)):
        with passing_note("compiling trees"):
            passes = _passes(ways, prompts, batch_size, sampling, settings, compiling.now)
        with progress_bar(TURNS, "timing trees", "turn") as bar:
            turns = race(passes, TURNS, compiling.now, bar.update)
    name = winner(turns)
    rates = {name: round(rate(own), 2) for name, own in turns.items()}
    entry = {"key": key, "tree": name, "tokens_per_second": rates}
    return Choice(name, rates, _remember(places, entry))


def candidates(models: Models, sampling: SamplingConfig) -> dict[str, Models]:
    """Return the ways to decode that enter the race, plain decoding first.

    Raises UserError where plain decoding would be alone.
    """
    assert models.head is not None  # a race is between trees of a head
    depth = min(models.head.config.max_depth or 4, 4)
    # Few, since each takes seconds to compile; where decoding is slow small trees pay.
    small = [f"dynamic:5:{depth}:2", f"dynamic:5:{depth}:2+copy:4"]
    # Trees whose children are drawn have a fixed shape and no copies.
    if sampling.draft_sampling == "sampled":
        small = ["paths:0/1/0.0/0.1/0.0.0"]
    names = [f"chain:{min(depth, 2)}", *small, portable_name(models.tree)]
    if models.head.config.kind == "lookup":
        names = ["copy:2", "copy:4", "copy:8", portable_name(models.tree)]

    ways = {PLAIN: models.plain()}
    for name in names:
        try:
            way = models.with_tree(parse_tree(name))
            way.step(sampling)
        except UserError:
            continue  # too deep or too wide for this head
        ways[name] = way
    if len(ways) == 1:
        models.step(sampling)  # raises the reason
    return ways


def _passes(
    ways: Mapping[str, Models],
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    sampling: SamplingConfig,
    settings: GenerationSettings,
    clock: Callable[[], float],
) -> dict[str, Callable[[int], int]]:
    """Return a function for each way that decodes a turn's prompts and returns new tokens."""
    new_tokens = FEWEST_TOKENS  # raised below, once the speed is known
    base = ways[PLAIN].base.config
    longest = max(1, base.max_position_embeddings - MOST_TOKENS)
    eos_ids = () if settings.ignore_eos else base.eos_token_ids
    request = functools.partial(Request, eos_ids=eos_ids, params=settings.warping)

    def decode(models: Models, turn: int) -> int:
        # Each turn continues after the last prompt of the turn before; no slot stays empty.
        numbers = range(turn * batch_size, (turn + 1) * batch_size)
        prompt_ids = [list(prompts[i % len(prompts)])[-longest:] for i in numbers]
        requests = [request(i, ids, new_tokens) for i, ids in enumerate(prompt_ids)]
        engine = models.engine(batch_size, sampling)
        updates = engine.stream(models.base.params, models.draft_params, requests)
        return sum(len(update.new_ids) for update in updates)

    # A few tokens compile everything, and show how many a turn has time for.
    started = clock()
    tokens = decode(ways[PLAIN], 0)
    seconds = (clock() - started) * batch_size / tokens  # of a step, which has a token of each row
    for name in filter(PLAIN.__ne__, ways):
        decode(ways[name], 0)
    most = min(MOST_TOKENS, settings.max_new_tokens)
    new_tokens = min(max(int(TURN_SECONDS / seconds), FEWEST_TOKENS), most)
    return {name: functools.partial(decode, models) for name, models in ways.items()}


class Turn(NamedTuple):
    """What a way decoded in one turn."""

    tokens: int
    seconds: float


def rate(turns: Iterable[Turn]) -> float:
    """Return tokens a second, over all these turns."""
    tokens, seconds = zip(*turns, strict=True)
    return sum(tokens) / sum(seconds)


def race(
    passes: Mapping[str, Callable[[int], int]],
    turns: int,
    clock: Callable[[], float],
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[Turn]]:
    """Return the turns of each way.

    passes: called with the number of the turn, they return the number of tokens decoded.
    The first of a turn rotates, so that a slow moment of the machine does not always hit the same
    way. A way that is far behind after FEWEST_TURNS leaves the race; plain decoding stays.
    """
    decoded: dict[str, list[Turn]] = {name: [] for name in passes}
    running = list(passes)
    for turn in range(turns):
        first = turn % len(running)
        for name in running[first:] + running[:first]:
            started = clock()
            decoded[name].append(Turn(passes[name](turn), clock() - started))
        after_turn()

        if turn + 1 >= FEWEST_TURNS:
            rates = {name: rate(decoded[name]) for name in running}
            bar = FAR_BEHIND * max(rates.values())
            running = [name for name in running if name == PLAIN or rates[name] >= bar]
    return decoded


def winner(decoded: Mapping[str, Sequence[Turn]]) -> str:
    """Return the fastest way; PLAIN unless a tree is faster whichever turn is left out.

    So neither one prompt nor one slow moment of the machine decides for a tree.
    """
    plain = decoded[PLAIN]

    def pays(own: Sequence[Turn]) -> bool:
        if len(own) < len(plain):  # left the race
            return False
        # Turns have different prompts, so the same one is left out of both.
        pairs = list(zip(own, plain, strict=True))
        few = (zip(*kept, strict=True) for kept in itertools.combinations(pairs, len(pairs) - 1))
        return all(rate(tree) > rate(without) for tree, without in few)

    paying = [name for name, own in decoded.items() if pays(own)]
    return max(paying, key=lambda name: rate(decoded[name]), default=PLAIN)


def _key(
    models: Models, batch_size: int, sampling: SamplingConfig, settings: GenerationSettings
) -> dict[str, Any]:
    """Return JSON values that differ where another tree may be the fastest."""
    device = jax.devices()[0]
    # All CPUs have one name, so a machine's own stands for its processor.
    kind = f"cpu of {platform.node()}" if device.platform == "cpu" else device.device_kind
    assert models.head is not None  # as in `candidates`
    return {
        "version": f"{clover_jax.__version__}, jax {jax.__version__}",
        "device": kind,
        "mesh": dict(models.mesh.shape) if models.mesh else None,
        "dtype": str(models.dtype),
        "int8": list(models.int8),
        "attention": models.attention,
        "base": lm_head_hash(models.base)[:16],
        "draft": f"{models.head.config.kind} {checksum(models.draft_params or {})}",
        "batch_size": batch_size,
        "temperature": "above 0" if settings.temperature > 0 else "0",
        "new_tokens": min(settings.max_new_tokens, MOST_TOKENS),
        "ignore_eos": settings.ignore_eos,
        "sampling": sampling.to_dict(),
    }


def _places(models: Models) -> list[Path]:
    """Return the files that may remember a choice, the preferred one first."""
    assert models.draft is not None  # as in `candidates`
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [cache / "clover_jax" / FILE]
    source = models.draft.source
    folder = None if needs_no_file(source) else native_directory(Path(source).expanduser())
    return places if folder is None else [folder / FILE, *places]


def _entries(path: Path, tell: bool = False) -> list[dict[str, Any]]:
    try:
        entries = list(read_json_object(path)["choices"])
        return [entry for entry in entries if {"key", "tree", "tokens_per_second"} <= set(entry)]
    except (UserError, KeyError, TypeError) as error:
        if tell and path.is_file():
            say(f"{path} is not read and will be written again: {error}")
        return []


def _remember(places: Sequence[Path], entry: dict[str, Any]) -> Path | None:
    """Add a choice to the first file that can be written, and return its path."""
    for path in places:
        choices = [*_entries(path, tell=True), entry]
        try:
            with atomic_file(path) as unfinished:
                unfinished.write_text(json.dumps({"choices": choices}, indent=1) + "\n")
        except OSError:
            continue
        return path
    return None


def with_attention(
    models: Models, name: str, batch_size: int, platform: str | None = None
) -> Models:
    """Return models with the implementation of `--attention`; auto is measured on a TPU or GPU.

    The kernel is used where it reads a random cache as XLA's program does, and faster.
    platform: of the programs; None is this process's. Several processes use XLA's program: with
        different clocks they could choose differently.
    """
    kernel = KERNELS.get(platform or jax.default_backend())
    if name != "auto" or kernel is None or process_count() > 1:
        return models
    placement, chosen = Placement(models.mesh), "xla"
    try:
        with passing_note("timing attention"), placement.in_use():
            runs = _attention_runs(models, placement.whole_rows(batch_size), kernel)
            by_xla, by_kernel = (run().astype(jnp.float32) for run in runs.values())
            apart = float(jnp.abs(by_xla - by_kernel).max())
            seconds = time_in_turns(runs, rounds=9)
    except Exception as error:  # compilers raise errors of every kind, and XLA's program works
        reason = f"{kernel} does not run here: {reason_of(error)[:200]}"
    else:
        taken = (f"{name} {1e6 * each:.0f} us a layer" for name, each in seconds.items())
        reason = ", ".join(taken)
        if not apart < APART[str(models.dtype)]:  # or NaN
            reason = f"{kernel} differs by {apart:.1e}"
        elif seconds[kernel] < seconds["xla"]:
            chosen = kernel
    say(f"attention: {chosen} ({reason})")
    return dataclasses.replace(models, attention=chosen)


def _attention_runs(models: Models, batch: int, kernel: str) -> dict[str, Callable[[], jax.Array]]:
    """Return functions that read one layer's random cache with XLA's program and the kernel."""
    config, slots = models.base.config.head_layer, models.tree.num_slots
    context = fitting_context(models, room=0)
    size = cache_size(models, context, room=0)
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (batch, config.num_kv_heads, *shape), models.dtype)

    query = normal(config.num_groups, slots, config.head_dim)
    fresh = KeyValue(normal(slots, config.head_dim), normal(slots, config.head_dim))
    cache = KeyValue(normal(size, config.head_dim), normal(size, config.head_dim))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((slots, slots), bool)), (batch, slots, slots))
    # Rows of all lengths, from none to the whole context.
    length = jnp.linspace(context, 0, batch).astype(jnp.int32)

    def run(attention: str) -> Callable[[], jax.Array]:
        committed = read_with(cache_reader(attention), cache)
        return functools.partial(jax.jit(attend), query, fresh, mask, committed, length)

    return {name: run(name) for name in ("xla", kernel)}
