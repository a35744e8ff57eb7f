"""The library for notebooks and programs: load a base, train and load a draft, generate.

    from clover_jax import api

    models = api.load_base("builtin:tiny")
    for piece in api.generate(models, "def area(", max_new_tokens=16):
        print(piece.text, end="")
    print(f"\\n{piece.tokens} tokens, {piece.finish_reason}")

With a draft the same text comes in fewer forwards, `piece.tau` tokens at each:

    api.train("runs/clover2", steps=1000, data="builtin:python")
    models = api.load_draft(models, "runs/clover2")

`generate_rows` decodes many prompts at once, into the rows of the command's files. The command
`train` calls `train` here; `generate` loads and decodes by the functions that these are made of, so
texts and figures are the same, and adds files, resuming and a bar. What a user can get wrong raises
`UserError`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from absl import flags as absl_flags

from clover_jax import convert as convert_command
from clover_jax import evaluate as evaluate_command
from clover_jax import prepare as prepare_command
from clover_jax.cli import command_flags
from clover_jax.data.prompts import BadPrompt, Prompt, parse_prompt
from clover_jax.errors import UserError
from clover_jax.field_types import check_settings, check_types
from clover_jax.generation.row_stream import open_stream
from clover_jax.generation.settings import GenerationSettings
from clover_jax.loading.models import Models, load
from clover_jax.loading.spec import ModelSpec
from clover_jax.quantization import parse_parts
from clover_jax.sharding.meshes import mesh_for
from clover_jax.training.run import run_training
from clover_jax.training.settings import TrainSettings

__all__ = [
    "GenerationSettings",
    "Models",
    "Piece",
    "TrainSettings",
    "UserError",
    "convert",
    "evaluate",
    "generate",
    "generate_rows",
    "load_base",
    "load_draft",
    "prepare",
    "train",
]

Settings = TypeVar("Settings", GenerationSettings, TrainSettings)
PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some more of a text, and figures of all of it so far.

    text: what is new; "" while nothing is settled, or without a tokenizer.
    ids: the new tokens. Earlier pieces may have given some of a stop string that ends the text.
    tokens: tokens so far; in the last piece, those that are kept. forwards: the base's forwards
        after the prompt's own.
    tau: tokens per forward, the first token left out; None before the first forward.
    finish_reason: "eos", "stop" or "length" in the last piece, else None.
    """

    text: str
    ids: list[int]
    tokens: int
    forwards: int
    tau: float | None
    finish_reason: str | None = None


def load_base(
    source: str | Path = "builtin:tiny",
    dtype: str = "auto",
    mesh: str | None = None,
    int8: Sequence[str] = (),
    chat_template: str | None = None,
) -> Models:
    """Load a base and its tokenizer, for plain decoding.

    source: a Hugging Face folder, a hub id (`owner/name`, `owner/name@revision`), "builtin:tiny",
        or "shape:NAME" for random weights.
    dtype: "float32", "bfloat16" or "auto", which is float32 on CPU and bfloat16 elsewhere.
    mesh: the devices to decode on, such as "tensor=4"; None: one.
    int8: whose matrices to quantize to 8 bits: "draft", which leaves the text as it is, "base".
    chat_template: a Jinja file, or "vicuna" or "baichuan2"; None: the base's own.
    """
    parts = parse_parts(int8 or ())
    template = None if chat_template is None else str(chat_template)
    spec = ModelSpec(str(source), dtype=str(dtype), mesh=mesh, int8=parts, chat_template=template)
    check_types(spec)
    return load(spec)


def load_draft(
    models: Models,
    source: str | Path,
    tree: str | None = None,
    *,
    copy: int = 0,
    copy_from: str | Path | None = None,
    allow_base_mismatch: bool = False,
    draft_rope_theta: float | None = None,
) -> Models:
    """Return models that share the base and decode with a draft.

    source: a draft directory, a training workdir, a folder or hub id in an official layout, or
        "lookup" or "recycle", which draft from the text and need no file.
    tree: as `generate --tree` takes it, "auto" excepted; by default the draft's own, else paper25.
    copy: nodes for copies beside the tree's own.
    copy_from: a text file that copies may come from too.
    """
    # What is shared with the base is not loaded again.
    spec = ModelSpec(
        draft=str(source),
        tree=tree,
        copy=_plain(copy),
        copy_from=None if copy_from is None else str(copy_from),
        allow_base_mismatch=allow_base_mismatch,
        draft_rope_theta=_plain(draft_rope_theta),
    )
    check_settings(spec)
    return load(spec, models.plain())


def generate(
    models: Models, prompt: PromptLike, *, seed: int = 0, **settings: Any
) -> Iterator[Piece]:
    """Decode one prompt and yield its text as it comes.

    prompt: text, token ids, or messages ({"role", "content"}) for the chat template.
    settings: fields of `GenerationSettings`: max_new_tokens, temperature, top_k, top_p, stop, ...
    A second call with the same models and kind of settings compiles nothing.
    """
    # One row, watched: every forward that settles text is an event.
    row = as_prompt(prompt)
    chosen = _chosen(GenerationSettings, settings)
    stream = open_stream(models, [row], chosen, seed=_plain(seed), strict=True, is_watched=True)
    for event in stream:
        if event.progress is None:
            assert event.row is not None  # of a prompt that was skipped
            raise UserError(event.row["skipped"])
        turn, new = event.progress.turn, event.progress.pieces
        # A chunk of steps may hold several forwards; a caller wants their text at once.
        text = "".join(piece.text for piece in new)
        ids = [id_ for piece in new for id_ in piece.ids]
        figures = (len(turn.output_ids), turn.target_forwards, turn.tau, turn.finish_reason)
        yield Piece(text, ids, *figures)


def generate_rows(
    models: Models,
    prompts: Iterable[PromptLike | Mapping[str, Any]],
    *,
    batch_size: int = 8,
    seed: int = 0,
    strict: bool = True,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Decode many prompts, `batch_size` at once, and yield each one's output row when it ends.

    prompts: as `generate` takes them, or rows as in the command's files ({"turns": [...]}, ...).
    strict: raise the UserError of a prompt that cannot be decoded; else yield it as a row,
        {"index": 4, "error": "..."}, as the command does.
    Yields what `generate --output` writes: index (of the prompt), output_ids, text, tau, ...
    """
    # A text is iterable too: it would be decoded letter by letter.
    if isinstance(prompts, str | bytes | Mapping):
        raise UserError(f"prompts must be several, not {prompts!r}; give [{prompts!r}] for one")
    rows = [_row(prompt, index, strict) for index, prompt in enumerate(prompts)]
    chosen = _chosen(GenerationSettings, settings)
    batch_size, seed = _plain(batch_size), _plain(seed)
    stream = open_stream(models, rows, chosen, batch_size=batch_size, seed=seed, strict=strict)
    # Events without a row report progress of rows that still run.
    yield from (event.row for event in stream if event.row is not None)


def train(
    workdir: str | Path,
    *,
    stop: threading.Event | None = None,
    mesh: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a draft head in `workdir`, or go on where an earlier call stopped; return the report.

    stop: when set, the run saves a checkpoint after its current step and returns.
    mesh: the devices to train on, such as "data=2,fsdp=-1"; None: one.
    settings: fields of `TrainSettings`, which are the flags of `python -m clover_jax.train`.
    """
    chosen = _chosen(TrainSettings, settings)
    # A run looks at the event between steps; without a caller's it is never set.
    stop = stop or threading.Event()
    return run_training(chosen, Path(workdir).expanduser(), stop, mesh_for(mesh))


def evaluate(
    output: str | Path, drafts: Mapping[str, str | Path] | None = None, **settings: Any
) -> dict[str, Any]:
    """Measure drafts against plain decoding and return the key figures of the report in `output`.

    drafts: name in the report -> draft, as `load_draft` takes it; None measures plain decoding and
        the baselines.
    settings: the flags of `python -m clover_jax.evaluate`: base, prompts, repeats, ...
    """
    # The command's own parser checks these, so both refuse the same.
    named = ",".join(f"{name}={source}" for name, source in (drafts or {}).items())
    return _execute(evaluate_command, output=output, drafts=named or None, **settings)


def prepare(output: str | Path, **settings: Any) -> dict[str, Any]:
    """Write training samples, activations or new answers to `output`; return the counts.

    settings: the flags of `python -m clover_jax.prepare`: data, base, seq_len, features, ...
    """
    return _execute(prepare_command, output=output, **settings)


def convert(input: str | Path, output: str | Path, **settings: Any) -> dict[str, Any]:
    """Write the head at `input` to `output` in the layout `to`; return the report.

    settings: the flags of `python -m clover_jax.convert`: base, to, verify, ...
    """
    return _execute(convert_command, input=input, output=output, **settings)


def _row(prompt: PromptLike | Mapping[str, Any], index: int, strict: bool) -> Prompt | BadPrompt:
    try:
        return as_prompt(prompt, index)
    except UserError as error:
        # A row keeps its place in the output, so that later indices stay right.
        if strict:
            raise
        return BadPrompt(index, f"prompt {index}", str(error))


def as_prompt(prompt: PromptLike | Mapping[str, Any], index: int = 0) -> Prompt:
    """Return the prompt row that stands for text, token ids or messages, or that is given."""
    # Ids and a row's values may come from numpy or jax, or be tuples.
    prompt = _plain(prompt)
    # Mappings and text come first, since they can be iterated too.
    if isinstance(prompt, Mapping):
        row = prompt
    elif isinstance(prompt, str):
        row = {"prompt": prompt}
    elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise UserError(
            f"prompt {index} must be text, token ids, messages or a row, not {prompt!r}"
        )
    else:
        listed = list(prompt)
        of_messages = bool(listed) and isinstance(listed[0], Mapping)
        row = {"messages": listed} if of_messages else {"prompt_ids": _plain(listed)}
    return parse_prompt(row, index=index, source=f"prompt {index}")


def _plain(value: Any) -> Any:
    """Return numpy's and jax's numbers and arrays, tuples and mappings as JSON would have them.

    NaN stays, for what reads the value to refuse.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _chosen(kind: type[Settings], given: dict[str, Any]) -> Settings:
    """Return settings of a kind; raises UserError listing its fields where one is unknown."""
    # Python would name only the first argument that is too many, not those that exist.
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UserError(f"{unknown[0]!r} is no setting; the settings are {', '.join(known)}")
    # A number may come from numpy or jax.
    plain = {name: v.tolist() if hasattr(v, "tolist") else v for name, v in given.items()}
    return kind(**plain)


def _execute(command: ModuleType, **given: Any) -> dict[str, Any]:
    """Run a command with these flags, checked as on the command line; None is unset."""
    # Values go through the flags' own text form, which has one checker.
    defined = command_flags.defined(command.define_flags)
    argv = []
    for name, value in given.items():
        if name not in defined or name == "flagfile":
            known = ", ".join(sorted(set(defined) - {"flagfile"}))
            raise UserError(f"{name!r} is no setting; the settings are {known}")
        # None leaves the flag out, so that its default holds.
        values: Sequence[Any] = [] if value is None else [value]
        if isinstance(value, list | tuple):
            # A list is one flag with commas, but for a flag that is written again for each value.
            is_repeated = isinstance(defined[name], absl_flags.MultiFlag)
            values = value if is_repeated else [",".join(map(str, value))]
        argv += [f"--{name}={one}" for one in values]

    # The command turns these into one line; a caller of the library gets the same line.
    try:
        flags = command_flags.parse_flags(command.define_flags, argv)
    except absl_flags.Error as error:
        raise UserError(str(error)) from error
    return command.execute(flags)
