"""Sums over decoded rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from clover_jax.decoding.requests import AcceptedLengths


class RowTotals:
    """Sums over output rows, of an earlier run too."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()):
        self.rows = self.failed = self.skipped = 0
        self._lengths = AcceptedLengths()
        for row in rows:
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Count an output row."""
        self.rows += 1
        self.failed += "error" in row
        self.skipped += "skipped" in row
        for output_ids, accepted in turn_columns(row, ("output_ids", "accepted")):
            self._lengths.add(len(output_ids), accepted)

    @property
    def tokens(self) -> int:
        """Emitted tokens, with EOS and the token of prefill."""
        return self._lengths.tokens

    @property
    def tau(self) -> float | None:
        """Emitted tokens per target forward pass, without prefill."""
        return self._lengths.tau

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return {
            "tau": self.tau,
            "tokens": self.tokens,
            "target_forwards": self._lengths.forwards,
            "accepted_histogram": self._lengths.histogram(),
            "rows": self.rows,
            "failed": self.failed,
            "skipped": self.skipped,
        }

    def summary(self, tokens_per_second: float | None) -> str:
        """Return the figures in one line for a person."""
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        speed = "" if tokens_per_second is None else f", {tokens_per_second:.0f} tokens/s"
        forwards = self._lengths.forwards
        counts = self._lengths.histogram()
        # Lengths that never happened are left out, since copies may accept 25 tokens at once.
        shares = []
        for accepted, count in enumerate(counts):
            share = 100 * count / max(forwards, 1)
            if count:
                shares.append(f"{accepted}: {f'{share:.0f}' if share >= 0.5 else 'below 1'} %")
        drafted = f"; drafted tokens accepted a forward: {', '.join(shares)}" if counts[1:] else ""
        return f"tau {tau}, {self.tokens} tokens in {forwards} forwards{speed}{drafted}"


def turn_columns(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield these columns of every turn of an output row; none of a failed or skipped row."""
    if "output_ids" not in row:
        return
    columns = [row[name] for name in names]
    if isinstance(row["finish_reason"], list):
        # Several turns: each column is a list with one entry per turn.
        yield from zip(*columns, strict=True)
    else:
        yield tuple(columns)
