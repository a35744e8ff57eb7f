"""Times: one leg is one pass of one method over one task; DIR/legs.jsonl keeps them.

Within a repeat the methods take turns, so that what slows the machine down meets all of them. A
throughput is tokens / wall seconds, prefill and the host's work included, the same count for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.storage.jsonl import append_row, keep_rows, read_rows
from clover_jax.timing.spread import Spread

LEGS = "legs.jsonl"


class LegKey(NamedTuple):
    """Which leg: what tells it from every other one."""

    batch_size: int
    task: str
    repeat: int
    method: str


@dataclasses.dataclass(frozen=True)
class Leg:
    """One timed pass.

    seconds: wall time, compilation taken out. compile_seconds: what was taken out.
    changed: the rows whose tokens differ from those of the method's first pass, as they came out.
    session: which start of the command measured it, from 0.
    conditions: the hardware and the versions that it was measured on.
    revision: of this code, as `git_revision` gives it.
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
    def key(self) -> LegKey:
        """Which leg it is."""
        return LegKey(self.batch_size, self.task, self.repeat, self.method)

    @property
    def num_failed(self) -> int:
        """Rows that failed here and not in the method's first pass."""
        return sum("error" in row for row in self.changed)


_FIELDS = {field.name for field in dataclasses.fields(Leg)}


def _is_of(row: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    return row.keys() == _FIELDS and row["conditions"] == conditions


class LegJournal:
    """The legs that are done, those of earlier sessions under the same conditions included."""

    def __init__(
        self,
        directory: Path,
        conditions: Mapping[str, Any],
        overwrite: bool,
        revision: str | None = None,
    ):
        """Read DIR/legs.jsonl; start anew with `overwrite`.

        conditions: of this session, as JSON values; legs of others go, and are measured again, as
            do those of a form of earlier versions: `num_dropped` in all.
        revision: of this session's code; legs of others stay, and say so.
        """
        self._path, self.conditions, self.revision = directory / LEGS, conditions, revision
        if overwrite:
            self._path.unlink(missing_ok=True)
        before = self._read()
        keep_rows(self._path, lambda row: _is_of(row, conditions))
        rows = self._read()
        self.num_dropped = len(before) - len(rows)
        self._legs = {leg.key: leg for leg in (Leg(**row) for row in rows)}
        self.session = max((leg.session for leg in self._legs.values()), default=-1) + 1

    def _read(self) -> list[dict[str, Any]]:
        return list(read_rows(self._path)) if self._path.exists() else []

    def __contains__(self, key: LegKey) -> bool:
        return key in self._legs

    def add(self, leg: Leg) -> None:
        """Note a leg that has just ended."""
        append_row(self._path, dataclasses.asdict(leg))
        self._legs[leg.key] = leg

    def select(self, **wanted: Any) -> list[Leg]:
        """Return the legs whose attributes are these."""
        return [
            leg
            for leg in self._legs.values()
            if all(getattr(leg, name) == value for name, value in wanted.items())
        ]

    def of(self, keys: Collection[LegKey]) -> list[Leg]:
        """Return the legs of these keys, in their order."""
        return [self._legs[key] for key in keys if key in self._legs]


def throughputs(legs: Iterable[Leg]) -> dict[int, float]:
    """Return repeat -> tokens per second over all legs of that repeat."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for leg in legs:
        tokens[leg.repeat] = tokens.get(leg.repeat, 0) + leg.tokens
        seconds[leg.repeat] = seconds.get(leg.repeat, 0.0) + leg.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens if seconds[repeat] > 0}


def speed(legs: Sequence[Leg], vanilla: Sequence[Leg]) -> dict[str, Any]:
    """Return a method's tokens per second and its speed-up, repeat by repeat, for a report."""
    mine, plain = throughputs(legs), throughputs(vanilla)
    ratios = [mine[repeat] / plain[repeat] for repeat in sorted(mine) if plain.get(repeat)]
    figures = {
        "tokens_per_second": Spread.of([mine[repeat] for repeat in sorted(mine)]),
        "speedup": Spread.of(ratios),
    }
    return {
        **{name: value and dataclasses.asdict(value) for name, value in figures.items()},
        "seconds": sum(leg.seconds for leg in legs),
        "rows_changed": sum(len(leg.changed) for leg in legs),
        "rows_failed": sum(leg.num_failed for leg in legs),
    }


def split_turns(legs: Iterable[Leg]) -> list[dict[str, Any]]:
    """Return which turns were not measured side by side: their legs are of several sessions."""
    sessions: dict[tuple[int, str, int], set[int]] = {}
    for leg in legs:
        sessions.setdefault((leg.batch_size, leg.task, leg.repeat), set()).add(leg.session)
    return [
        {"batch_size": size, "task": task, "repeat": repeat}
        for (size, task, repeat), found in sessions.items()
        if len(found) > 1
    ]
