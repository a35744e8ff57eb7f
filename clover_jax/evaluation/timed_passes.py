"""Timed passes: one method decoding one task once; DIR/legs.jsonl keeps them.

Within a repeat the methods alternate, so that a slow phase of the machine affects all of them. A
throughput is tokens / wall seconds, prefill and the host's work included, the same count for all.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.runtime.distributed import is_primary
from clover_jax.storage.jsonl import append_row, keep_rows, read_rows
from clover_jax.timing.turns import Spread

JOURNAL = "legs.jsonl"


class PassKey(NamedTuple):
    """The name of a timed pass: no other one has the same four values."""

    batch_size: int
    task: str
    repeat: int
    method: str


class Origin(NamedTuple):
    """Where times come from.

    session: which start of the command measured them, from 0. conditions: the hardware, versions
    and mesh, as JSON values. revision: of this code, as `git_revision` gives it.
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
    """The passes that are done, those of earlier sessions under the same conditions included.

    num_dropped: rows of other conditions or of another version's form, which are measured again.
    origin: of what this session measures.
    """

    def __init__(
        self,
        directory: Path,
        conditions: Mapping[str, Any],
        overwrite: bool,
        revision: str | None = None,
    ):
        """Read DIR/legs.jsonl; start anew with `overwrite`.

        conditions, revision: of this session. Passes of other conditions go, those of another
        revision of the code stay.
        """

        # Another version's row has other columns; it is measured again rather than read.
        def is_usable(row: Mapping[str, Any]) -> bool:
            return row.keys() == _COLUMNS and row["conditions"] == conditions

        self._path = directory / JOURNAL
        if overwrite:
            self._path.unlink(missing_ok=True)
        rows = list(read_rows(self._path)) if self._path.exists() else []
        # Rewritten at every start: a torn last line must go before a row is appended to it.
        keep_rows(self._path, is_usable)

        passes = [TimedPass.from_row(row) for row in rows if is_usable(row)]
        # A pass that was begun twice counts as it ended last.
        self._passes = {one.key: one for one in passes}
        self.num_dropped = len(rows) - len(passes)
        # This session's number: one more than that of any pass here.
        sessions = (one.origin.session for one in self._passes.values())
        self.origin = Origin(max(sessions, default=-1) + 1, conditions, revision)

    def __contains__(self, key: PassKey) -> bool:
        return key in self._passes

    def add(self, timed: TimedPass) -> None:
        """Note a pass that has just ended; of several processes the primary writes it."""
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
        # Here and not in the method's first pass, whose rows are counted apart.
        "rows_failed": sum("error" in row for one in passes for row in one.changed),
    }


def split_rounds(passes: Iterable[TimedPass]) -> list[dict[str, Any]]:
    """Return the rounds whose passes are of several sessions, so not measured side by side."""
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
