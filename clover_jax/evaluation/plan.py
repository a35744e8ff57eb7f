"""The plan of a run: prompts by task, the order of timed passes, and the journal of finished ones.

A timed pass is one method decoding one task once. Within a repeat the methods alternate, so that a
slow phase of the machine affects all of them. A throughput is tokens / wall seconds, with prefill
and the host's work. DIR/legs.jsonl keeps the passes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.requests import Request
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.runtime.distributed import is_primary
from clover_jax.runtime.jsonl import append_row, keep_rows, read_rows
from clover_jax.runtime.turns import Spread

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
        """All rows, task by task."""
        return [prompt for rows in self.tasks.values() for prompt in rows]

    @property
    def is_equality_expected(self) -> bool:
        """Whether a draft must emit plain decoding's very tokens.

        Children sampled from the draft give the right distribution with other random numbers, and
        Medusa's rule gives another distribution.
        """
        return self.sampling.verify != "typical" and self.sampling.draft_sampling == "topk"

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


class Origin(NamedTuple):
    """Where times come from.

    session: number of the start of the command, from 0. conditions: hardware, versions and mesh,
    as JSON values. revision: of this code, as `git_revision` returns it.
    """

    session: int
    conditions: Mapping[str, Any]
    revision: str | None


@dataclasses.dataclass(frozen=True)
class TimedPass:
    """One method decoding one task once.

    seconds: wall time, compilation taken out. compile_seconds: what was taken out.
    changed: the rows whose tokens differ from those of the method's first pass, as they came out.
    """

    key: PassKey
    origin: Origin
    rows: int
    tokens: int
    seconds: float
    compile_seconds: float
    changed: Sequence[Mapping[str, Any]] = ()

    def to_row(self) -> dict[str, Any]:
        """Return the row of the journal."""
        own = {name: getattr(self, name) for name in _OWN}
        return {**self.key._asdict(), **own, **self.origin._asdict()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> TimedPass:
        """Read a row of the journal."""
        key = PassKey(*(row[name] for name in PassKey._fields))
        origin = Origin(*(row[name] for name in Origin._fields))
        return cls(key, origin, **{name: row[name] for name in _OWN})


# Fields outside of key and origin; together with those they are the columns of the journal.
_OWN = ("rows", "tokens", "seconds", "compile_seconds", "changed")
_COLUMNS = {*PassKey._fields, *_OWN, *Origin._fields}


class PassJournal:
    """The finished passes; passes of earlier sessions count under the same conditions.

    num_dropped: rows of other conditions or of another version, which are measured again.
    origin: of the passes of this session.
    """

    def __init__(
        self,
        directory: Path,
        conditions: Mapping[str, Any],
        overwrite: bool,
        revision: str | None = None,
    ):
        """Read DIR/legs.jsonl, or delete it with `overwrite`.

        conditions, revision: of this session. Passes of other conditions are dropped, passes of
        another revision of the code are kept.
        """

        # A row of another version has other columns.
        def is_usable(row: Mapping[str, Any]) -> bool:
            return row.keys() == _COLUMNS and row["conditions"] == conditions

        self._path = directory / JOURNAL
        if overwrite:
            self._path.unlink(missing_ok=True)
        rows = list(read_rows(self._path)) if self._path.exists() else []
        # Rewritten at every start: a torn last line must go before a row is appended to it.
        keep_rows(self._path, is_usable)

        passes = [TimedPass.from_row(row) for row in rows if is_usable(row)]
        # Of a pass that was begun twice the last one counts.
        self._passes = {one.key: one for one in passes}
        self.num_dropped = len(rows) - len(passes)
        sessions = (one.origin.session for one in self._passes.values())
        self.origin = Origin(max(sessions, default=-1) + 1, conditions, revision)

    def __contains__(self, key: PassKey) -> bool:
        return key in self._passes

    def add(self, timed: TimedPass) -> None:
        """Record a pass that has just ended; only the primary process writes it."""
        if is_primary():
            append_row(self._path, timed.to_row())
        self._passes[timed.key] = timed

    def select(self, **wanted: Any) -> list[TimedPass]:
        """Return the passes whose keys have these values."""
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
        tokens[one.key.repeat] += one.tokens
        seconds[one.key.repeat] += one.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens if seconds[repeat] > 0}


def speed(passes: Sequence[TimedPass], plain: Sequence[TimedPass]) -> dict[str, Any]:
    """Return a method's tokens per second and its speed-up over `plain`, for a report."""
    rates, plain_rates = throughputs(passes), throughputs(plain)
    repeats = sorted(rates)
    # Ratios are taken within a repeat, where both methods met the same machine.
    ratios = [rates[repeat] / plain_rates[repeat] for repeat in repeats if plain_rates.get(repeat)]
    spreads = {
        "tokens_per_second": Spread.of([rates[repeat] for repeat in repeats]),
        "speedup": Spread.of(ratios),
    }
    return {
        **{name: value and dataclasses.asdict(value) for name, value in spreads.items()},
        "seconds": sum(one.seconds for one in passes),
        "rows_changed": sum(len(one.changed) for one in passes),
        # Rows of the method's first pass are counted in its tally.
        "rows_failed": sum("error" in row for one in passes for row in one.changed),
    }


def split_rounds(passes: Iterable[TimedPass]) -> list[dict[str, Any]]:
    """Return the rounds whose passes are of several sessions, so not measured alternately."""
    # A round: each method decodes one task once, at one batch size.
    sessions: dict[tuple[int, str, int], set[int]] = {}
    for one in passes:
        size, task, repeat, _ = one.key
        sessions.setdefault((size, task, repeat), set()).add(one.origin.session)
    return [
        {"batch_size": size, "task": task, "repeat": repeat}
        for (size, task, repeat), numbers in sessions.items()
        if len(numbers) > 1
    ]
