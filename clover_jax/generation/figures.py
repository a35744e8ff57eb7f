"""What decoded rows add up to."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

_COUNTED = ("output_ids", "accepted")


class Figures:
    """Sums over output rows, those of an earlier run among them.

    tokens: emitted ones, EOS and prefill's own included.
    target_forwards: forwards of the base after prefill.
    """

    def __init__(self):
        """Start from nothing."""
        self.rows = self.failed = self.skipped = 0
        self.tokens = self.target_forwards = 0
        self._drafting_tokens = 0  # without those of prefill
        self._accepted: collections.Counter[int] = collections.Counter()

    def add(self, row: dict[str, Any]) -> None:
        """Count an output row."""
        self.rows += 1
        self.failed += "error" in row
        self.skipped += "skipped" in row
        for output_ids, accepted in _turns(row):
            self.tokens += len(output_ids)
            self._drafting_tokens += max(len(output_ids) - 1, 0)
            self.target_forwards += len(accepted)
            self._accepted.update(accepted)

    @property
    def tau(self) -> float | None:
        """Emitted tokens per target forward, prefill's own token and forward excluded."""
        return self._drafting_tokens / self.target_forwards if self.target_forwards else None

    @property
    def accepted_histogram(self) -> list[int]:
        """At [k], how many forwards accepted k drafted tokens."""
        return [self._accepted[k] for k in range(max(self._accepted, default=-1) + 1)]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return {
            "tau": self.tau,
            "tokens": self.tokens,
            "target_forwards": self.target_forwards,
            "accepted_histogram": self.accepted_histogram,
            "rows": self.rows,
            "failed": self.failed,
            "skipped": self.skipped,
        }

    def summary(self, tokens_per_second: float | None) -> str:
        """Return the figures in one line for a person."""
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        speed = "" if tokens_per_second is None else f", {tokens_per_second:.0f} tokens/s"
        shares = [
            f"{k}: {100 * count / self.target_forwards:.0f} %"
            for k, count in enumerate(self.accepted_histogram)
        ]
        drafted = f"; drafted tokens accepted a forward: {', '.join(shares)}" if shares[1:] else ""
        return f"tau {tau}, {self.tokens} tokens in {self.target_forwards} forwards{speed}{drafted}"


def _turns(row: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield output_ids and accepted of every turn of a row; nothing for one that failed."""
    if "output_ids" not in row:
        return
    columns = [row[name] for name in _COUNTED]
    if isinstance(row["finish_reason"], list):
        yield from zip(*columns, strict=True)
    else:
        yield tuple(columns)
