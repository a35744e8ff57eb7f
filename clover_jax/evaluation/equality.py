"""Whether a method's text equals plain decoding's, and the first difference.

A row is judged by the worst of its texts: that of the first pass, and those of later passes, at
this batch size or another, that differ from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clover_jax.evaluation.rows import turns_of
from clover_jax.evaluation.timed_passes import TimedPass

NEAR_TIE, MISMATCH = "near-tie", "mismatch"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which a row differs from plain decoding's.

    index: of the row in its file. turn: number of the answer. position: of the token in it.
    expected, found: plain decoding's token and the other; None where the text had ended.
    batch_size, repeat: of the later pass that gave this text; None for the row's first.
    gap: plain decoding's score of its token less that of the other. threshold: how far rounding
        moves such differences in plain decoding itself. kind: NEAR_TIE or MISMATCH.
    """

    index: int
    turn: int
    position: int
    expected: int | None
    found: int | None
    batch_size: int | None = None
    repeat: int | None = None
    gap: float | None = None
    threshold: float | None = None
    kind: str = MISMATCH

    @property
    def is_mismatch(self) -> bool:
        """Whether it is more than a near-tie, or was not judged."""
        return self.kind == MISMATCH


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row against plain decoding's: equal, or the divergence; neither where one has no text."""

    is_compared: bool
    divergence: Divergence | None = None


Comparisons = Mapping[int, Sequence[Comparison]]  # row -> its texts, the first pass's first


def compare_rows(row: Mapping[str, Any], vanilla: Mapping[str, Any]) -> Comparison:
    """Compare the texts of two output rows, turn by turn up to the first difference."""
    # Text after a difference has another context, so it cannot be compared.
    pairs = list(zip(turns_of(row), turns_of(vanilla), strict=False))
    for number, (mine, plain) in enumerate(pairs):
        position = first_difference(mine.output_ids, plain.output_ids)
        if position is not None:
            tokens = _at(plain.output_ids, position), _at(mine.output_ids, position)
            return Comparison(True, Divergence(row["index"], number, position, *tokens))
    return Comparison(bool(pairs))


def compare_passes(
    rows: Mapping[int, Mapping[str, Any]],
    passes: Iterable[TimedPass],
    plain: Mapping[int, Mapping[str, Any]],
) -> Comparisons:
    """Return row -> comparisons of its first pass, then of each later one that differs from it."""
    compared = {number: [compare_rows(row, plain[number])] for number, row in rows.items()}
    # A later pass keeps only the rows whose tokens differ from those of the first.
    for one in passes:
        for row in one.changed:
            again = compare_rows(row, plain[row["row"]])
            # A text that changed may have become plain decoding's.
            if again.divergence:
                size, repeat = one.key.batch_size, one.key.repeat
                placed = dataclasses.replace(again.divergence, batch_size=size, repeat=repeat)
                again = Comparison(True, placed)
            compared[row["row"]].append(again)
    return compared


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ; None where they are equal.

    Example: [5, 6] and [5, 6, 7] differ at 2.
    """
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    # The shorter text is the other's beginning, so it is its end that differs.
    return None if len(one) == len(other) else min(len(one), len(other))


def summarize(
    comparisons: Sequence[Sequence[Comparison]], divergences: Sequence[Divergence]
) -> dict[str, Any]:
    """Return the counts for a report.

    comparisons: of every row, those of its passes. divergences: of each row that has one the worst.
    """
    # A row whose first pass failed may have text in a later one.
    compared = sum(any(one.is_compared for one in passes) for passes in comparisons)
    # A divergence that was not judged is a mismatch.
    near_ties = sum(one.kind == NEAR_TIE for one in divergences)
    return {
        "compared": compared,
        "equal": compared - len(divergences),
        "near_ties": near_ties,
        "mismatches": len(divergences) - near_ties,
        "not_compared": len(comparisons) - compared,
    }


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
