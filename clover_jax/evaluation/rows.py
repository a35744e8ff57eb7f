"""Rows of rows/NAME.jsonl: those of `generate`, and what each forward proposed and accepted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clover_jax.data.prompts import Prompt
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.row_totals import turn_columns


class TurnRow(NamedTuple):
    """One answer of an output row.

    accepted, proposed, ranks: of each forward of the base, the drafted tokens that it accepted, how
        many it verified, and of each accepted one how many of its siblings come before it.
    num_cut: prompt tokens for which the context had no room.
    copied: how many of the accepted tokens were copies of the text; empty for trees without copies.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]
    proposed: list[int]
    ranks: list[list[int]]
    num_cut: int
    copied: Sequence[int] = ()


def turns_of(row: Mapping[str, Any]) -> Iterator[TurnRow]:
    """Yield every turn of an output row; nothing for one that failed or was skipped."""
    # Rows of trees without copies, and those of earlier versions, lack their column.
    names = [name for name in TurnRow._fields if name != "copied" or name in row]
    yield from itertools.starmap(TurnRow, turn_columns(row, names))


class RowMaker:
    """Makes output rows of events; one for each pass over prompts."""

    def __init__(self):
        self._forwards: dict[int, dict[str, list]] = {}

    def take(self, event: RowEvent) -> dict[str, Any] | None:
        """Take in an event; return the output row if it ended one, its index that of the prompt."""
        progress = event.progress
        if progress is not None and progress.ended:
            columns = self._forwards.setdefault(event.prompt.index, _empty_columns())
            # A stop string cuts forwards with the tokens that they gave.
            count = len(progress.turn.accepted)
            columns["proposed"].append(progress.generation.proposed[:count])
            columns["ranks"].append(progress.generation.ranks[:count])
            columns["copied"].append(progress.generation.copied[:count])
            columns["num_cut"].append(progress.num_cut)
        if event.row is None:
            return None

        # A row that failed after some turns keeps none of them, as in `generate`.
        columns = self._forwards.pop(event.row["index"], _empty_columns())
        if "output_ids" not in event.row:
            return event.row
        # A tree without copies has counted none.
        if not any(columns["copied"]):
            del columns["copied"]
        # A row of one turn has plain values, as `generate` writes them; others have a list.
        if isinstance(event.prompt, Prompt) and event.prompt.num_turns == 1:
            columns = {name: values[0] for name, values in columns.items()}
        return {**event.row, **columns}


def _empty_columns() -> dict[str, list]:
    return {"proposed": [], "ranks": [], "copied": [], "num_cut": []}
