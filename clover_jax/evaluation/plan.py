"""The plan of a run: its methods, prompts by task, the order of timed passes, and their journal.

A timed pass is one method decoding one task once. Within a repeat the methods alternate, so that a
slow phase of the machine affects all of them. A throughput is tokens / wall seconds, with prefill
and the host's work. DIR/legs.jsonl keeps the passes.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from clover_jax.data.prompts import BadPrompt, Prompt, read_prompts_and_mistakes, shipped_prompts
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models, check_names, load
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.race import with_attention, with_fastest_tree
from clover_jax.decoding.requests import Request
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_stream import source_size
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.spec import AUTO_TREE, NO_DRAFT
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation.options import VANILLA, DraftChoice, Options
from clover_jax.runtime.distributed import is_primary
from clover_jax.runtime.jsonl import append_row, keep_rows, read_rows
from clover_jax.runtime.progress import say

JOURNAL = "legs.jsonl"
MT_BENCH = "mt_bench"
# Spec-Bench has MT-bench's eight categories next to five other tasks, and counts them as one task.
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

Tasks = dict[str, list[Prompt | BadPrompt]]


class PassKey(NamedTuple):
    """The name of a timed pass: no other one has the same four values."""

    batch_size: int
    task: str
    repeat: int
    method: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that decodes all tasks `repeats` times at every batch size.

    longest: positions that the longest row may need.
    batch_sizes: rows that are decoded at once; on a mesh this may be more than the flag's value.
    """

    tasks: Tasks
    settings: GenerationSettings
    sampling: SamplingConfig
    seed: int
    repeats: int
    batch_sizes: Sequence[int]
    longest: int

    @property
    def prompts(self) -> list[Prompt | BadPrompt]:
        return [prompt for rows in self.tasks.values() for prompt in rows]

    def expects_equality(self, method: Method) -> bool:
        """Return whether a draft must emit plain decoding's very tokens.

        Sampled children give the distribution with other random numbers, Medusa's rule another one.
        """
        draws = method.models.step(self.sampling).draws_children
        return self.sampling.verify != "typical" and not draws

    def request(self, index: int, prompt_ids: Sequence[int], turn: int = 0) -> Request:
        """Return the request of a turn of a row, with its own settings; index: in the input."""
        prompt = next(prompt for prompt in self.prompts if prompt.index == index)
        assert isinstance(prompt, Prompt)  # a row that cannot be read has no turn
        own = self.settings.for_row(prompt)
        return Request(
            index, prompt_ids, own.max_new_tokens, params=own.warping, seed=own.seed, turn=turn
        )

    def passes(self, methods: Iterable[str]) -> Iterator[PassKey]:
        """Yield the keys of all timed passes of the methods, in the order in which they run.

        The first method changes each round: one that always begins would always meet a cold cache.
        """
        names, round_number = list(methods), 0
        for batch_size in self.batch_sizes:
            for task in self.tasks:
                for repeat in range(self.repeats):
                    # Counted over all tasks and sizes: each method begins about as often.
                    first = round_number % len(names)
                    for name in names[first:] + names[:first]:
                        yield PassKey(batch_size, task, repeat, name)
                    round_number += 1


def group_by_task(prompts: Sequence[Prompt | BadPrompt], limit: int | None = None) -> Tasks:
    """Return task -> its rows, tasks and rows in input order.

    A row without a category, or one that cannot be read, belongs to the task named by the stem of
    its file. MT-bench's categories are one task where the rows have others too.
    limit: most rows of each task.
    """
    categories = [getattr(prompt, "category", None) for prompt in prompts]
    # `>` is a proper superset: Spec-Bench has other categories too, MT-bench's own file has none.
    is_mixed = set(categories) - {None} > _MT_BENCH_CATEGORIES

    tasks: Tasks = {}
    for prompt, category in zip(prompts, categories, strict=True):
        is_part = is_mixed and category in _MT_BENCH_CATEGORIES
        # A source is a file and a line: "dir/HumanEval.jsonl.gz:3".
        stem = Path(prompt.source.rpartition(":")[0]).name.partition(".")[0] or "prompts"
        rows = tasks.setdefault(MT_BENCH if is_part else category or stem, [])
        if limit is None or len(rows) < limit:
            rows.append(prompt)
    return tasks


@dataclasses.dataclass(frozen=True)
class TimedPass:
    """One method decoding one task once.

    seconds: wall time, compilation taken out. compile_seconds: what was taken out.
    changed: the rows whose tokens differ from the method's first pass, as they came out.
    session: number of the start of the command, from 0. conditions: hardware, versions and mesh,
    as JSON values. revision: of this code, as `git_revision` returns it.
    """

    batch_size: int
    task: str
    repeat: int
    method: str
    rows: int
    tokens: int
    seconds: float
    compile_seconds: float
    changed: Sequence[Mapping[str, Any]]
    session: int
    conditions: Mapping[str, Any]
    revision: str | None

    @property
    def key(self) -> PassKey:
        return PassKey(self.batch_size, self.task, self.repeat, self.method)


class PassJournal:
    """The finished passes; passes of earlier sessions count under the same conditions.

    num_dropped: rows of other conditions or of another version, which are measured again.
    origin: of the passes of this session: the last three fields of a TimedPass.
    """

    def __init__(
        self, directory: Path, conditions: Mapping, overwrite: bool, revision: str | None = None
    ):
        """Read DIR/legs.jsonl, or delete it with `overwrite`.

        conditions, revision: of this session. Passes of other conditions (only) are dropped.
        """
        columns = {field.name for field in dataclasses.fields(TimedPass)}

        # A row of another version has other columns.
        def is_usable(row: Mapping[str, Any]) -> bool:
            return row.keys() == columns and row["conditions"] == conditions

        self._path = directory / JOURNAL
        if overwrite:
            self._path.unlink(missing_ok=True)
        rows = list(read_rows(self._path)) if self._path.exists() else []
        # Rewritten at every start: a torn last line must go before a row is appended to it.
        keep_rows(self._path, is_usable)

        # Of a pass that was begun twice the last one counts.
        usable = [TimedPass(**row) for row in filter(is_usable, rows)]
        self._passes = {one.key: one for one in usable}
        self.num_dropped = len(rows) - len(usable)
        session = max((one.session for one in self._passes.values()), default=-1) + 1
        self.origin: dict[str, Any] = {"session": session}
        self.origin |= {"conditions": conditions, "revision": revision}

    def __contains__(self, key: PassKey) -> bool:
        return key in self._passes

    def add(self, timed: TimedPass) -> None:
        """Record a pass that has just ended; only the primary process writes it."""
        if is_primary():
            append_row(self._path, dataclasses.asdict(timed))
        self._passes[timed.key] = timed

    def select(self, **wanted: Any) -> list[TimedPass]:
        return [one for one in self._passes.values() if one.key._asdict().items() >= wanted.items()]

    def of(self, keys: Collection[PassKey]) -> list[TimedPass]:
        """Return the passes of these keys, in their order."""
        return [self._passes[key] for key in keys if key in self._passes]


def throughputs(passes: Iterable[TimedPass]) -> dict[int, float]:
    """Return repeat -> tokens per second over all passes of that repeat."""
    # Tokens and seconds are summed before dividing, so that a task weighs by its time.
    tokens: collections.Counter[int] = collections.Counter()
    seconds: collections.defaultdict[int, float] = collections.defaultdict(float)
    for one in passes:
        tokens[one.repeat] += one.tokens
        seconds[one.repeat] += one.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens if seconds[repeat] > 0}


def speed(passes: Sequence[TimedPass], plain: Sequence[TimedPass]) -> dict[str, Any]:
    """Return a method's tokens per second and its speed-up over `plain`, for a report."""
    rates, plain_rates = throughputs(passes), throughputs(plain)
    repeats = sorted(rates)
    # Ratios are taken within a repeat, where both methods met the same machine.
    ratios = [rates[repeat] / plain_rates[repeat] for repeat in repeats if plain_rates.get(repeat)]
    return {
        "tokens_per_second": _spread([rates[repeat] for repeat in repeats]),
        "speedup": _spread(ratios),
        "seconds": sum(one.seconds for one in passes),
        "rows_changed": sum(len(one.changed) for one in passes),
        # Rows of the method's first pass are counted in its tally.
        "rows_failed": sum("error" in row for one in passes for row in one.changed),
    }


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the median, the least and the most of repeated figures; None of none."""
    if not values:
        return None
    most = {"least": min(values), "most": max(values), "repeats": tuple(values)}
    return {"median": statistics.median(values)} | most


def split_rounds(passes: Iterable[TimedPass]) -> list[dict[str, Any]]:
    """Return the rounds whose passes are of several sessions, so not measured alternately."""
    # A round: each method decodes one task once, at one batch size.
    sessions: dict[tuple[Any, ...], set[int]] = {}
    for one in passes:
        sessions.setdefault(one.key[:3], set()).add(one.session)
    names = PassKey._fields[:3]
    return [dict(zip(names, key, strict=True)) for key in sessions if len(sessions[key]) > 1]


@dataclasses.dataclass(frozen=True)
class Method:
    """Plain decoding, or a draft with its tree; a baseline is a draft without training.

    name: VANILLA or the draft's. source: where the draft was found; None for plain decoding.
    """

    name: str
    models: Models
    source: str | None = None


def load_methods(
    options: Options,
    settings: GenerationSettings,
    prompts: Sequence[Prompt | BadPrompt] | None = None,
) -> list[Method]:
    """Load the base once, then every draft and every baseline; plain decoding comes first.

    prompts: what will be decoded; None for the prompts in the base's folder.
    A draft with the tree "auto" gets the fastest one at `batch_size`, or the one that its rows were
    begun with. Raises UserError for what is missing, broken or does not fit the base.
    """
    drafts = []
    for choice in options.draft_choices:
        # A tree is chosen with the draft, which is loaded with its own tree first.
        tree = None if choice.tree == AUTO_TREE else choice.tree
        spec = dataclasses.replace(options.spec, draft=choice.source, tree=tree)
        check_names(spec)  # before the base, which takes longer
        drafts.append((choice, spec))
    baselines = choose_baselines(options, settings)

    # Copies are drafts, so plain decoding has none.
    plain = load(dataclasses.replace(options.spec, copy=0))
    plain = with_attention(plain, options.spec.attention, options.batch_size)
    methods = [Method(VANILLA, plain)]
    for choice, spec in drafts:
        models = load(spec, plain)  # shares the base's weights
        if choice.tree == AUTO_TREE:
            if prompts is None:
                shipped = shipped_prompts(plain.base.directory, "--prompts=FILE")
                prompts = read_prompts_and_mistakes(shipped)
            # Where rows of an earlier run are kept, their tree is used again.
            rows = None if options.overwrite else options.rows_path(choice.name)
            drafting = models
            models = with_fastest_tree(models, prompts, options.batch_size, settings, resumed=rows)
            # A draft is there to be measured: the report shows by how much it does not pay.
            if models.draft is None:
                say(f"{choice.name} is measured with {drafting.tree.name} nevertheless")
                models = drafting
        methods.append(Method(choice.name, models, choice.source))

    # Baselines have their own trees, and no --copy. Only lookup reads other texts.
    for choice in baselines:
        spec = dataclasses.replace(options.spec, draft=choice.source, copy=0)
        if choice.source != "lookup":
            spec = dataclasses.replace(spec, copy_from=None)
        methods.append(Method(choice.name, load(spec, plain), choice.source))
    return methods


def choose_baselines(options: Options, settings: GenerationSettings) -> list[DraftChoice]:
    """Return the baselines to measure: all training-free drafts, or the ones in `--baselines`."""
    words = map(str.strip, (options.baselines or "").split(","))
    names = list(dict.fromkeys(filter(None, words)))
    if names == [NO_DRAFT]:
        return []
    for name in names:
        if name not in TRAINING_FREE:
            raise UserError(
                f"--baselines: {name!r} is not a training-free draft; they are "
                f"{', '.join(TRAINING_FREE)}, or {NO_DRAFT} alone"
            )

    # They have no distribution to sample from, which is a mistake only where they were named.
    if options.baselines is None and settings.draft_sampling != "sampled":
        names = list(TRAINING_FREE)
    # A draft of the user replaces the baseline of that name.
    given = {word for draft in options.draft_choices for word in (draft.name, draft.source)}
    return [DraftChoice(name, name) for name in names if name not in given]


def sizes_on(mesh: Mesh | None, batch_sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes of engines, rounded up to equal rows per device, each once.

    Example: 1, 2 and 3 rows on two devices that split rows are 2, 2 and 4: [2, 4].
    """
    return list(dict.fromkeys(map(Placement(mesh).whole_rows, batch_sizes)))


def make_engines(methods: Sequence[Method], plan: Plan) -> dict[int, dict[str, Engine]]:
    """Return batch size -> an engine for each method by name; nothing compiles yet.

    Raises UserError where a tree does not suit its head or the rules of sampling.
    """
    engines: dict[int, dict[str, Engine]] = {size: {} for size in plan.batch_sizes}
    for method in methods:
        options = {"seed": plan.seed, "source_size": source_size(method.models, plan.prompts)}
        for size, of_size in engines.items():
            of_size[method.name] = method.models.engine(size, plan.sampling, **options)
    return engines


def warm_up(method: Method, engine: Engine, longest: int) -> None:
    """Compile every program that rows of up to `longest` positions may need.

    Buffers come in buckets: one pass in each, and one that grows through all of them.
    """
    context, depth = engine.config.base.max_position_embeddings, engine.config.tree.depth
    requests: list[Request] = []
    size = 0
    while size < engine.buffer_size(min(longest, context)):
        size = engine.buffer_size(size - depth + 1 if size else 1)
        # One token of prompt, and a limit that fills the buffer up to the tree's depth, which steps
        # may write beyond a row's end.
        limit = min(size - depth, context)
        requests.append(Request(len(requests), [0], max(limit - 1, 1)))

    # Alone a request starts in its bucket; together they grow from one bucket to the next.
    models = method.models
    for together in [*([request] for request in requests), requests]:
        for progress in engine.stream(models.base.params, models.draft_params, together):
            progress.stop()
