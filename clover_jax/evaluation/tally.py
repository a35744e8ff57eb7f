"""What decoded rows add up to: tau, hit rates, histograms, acceptance by context length.

Definitions, with a forward for each time the base verified:
    tau = emitted tokens / forwards, prefill's own token and forward left out;
    joint hit rate of position i = forwards that accepted positions 0..i / forwards;
    conditional hit rate of position i = the same among those that accepted 0..i-1.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any

from clover_jax.evaluation.rows import TurnRow, turns_of

_FIRST_BIN = 64


class Tally:
    """Sums over output rows of one method."""

    def __init__(self, depth: int):
        """Start from nothing; depth: of the method's tree, 0 for plain decoding."""
        self.rows = self.failed = self.skipped = self.truncated = self.turns = 0
        self.tokens = self.forwards = 0
        self._depth = depth
        self._drafting_tokens = self._proposed = 0
        self._accepted: collections.Counter[int] = collections.Counter()
        self._ranks = [collections.Counter() for _ in range(depth)]
        self._context_forwards: collections.Counter[int] = collections.Counter()
        self._context_accepted: collections.Counter[int] = collections.Counter()

    def add(self, row: dict[str, Any]) -> None:
        """Count an output row."""
        self.rows += 1
        self.failed += "error" in row
        self.skipped += "skipped" in row
        turns = list(turns_of(row))
        self.truncated += any(turn.num_cut for turn in turns)
        for turn in turns:
            self._add_turn(turn)

    def _add_turn(self, turn: TurnRow) -> None:
        self.turns += 1
        self.tokens += len(turn.output_ids)
        self._drafting_tokens += max(len(turn.output_ids) - 1, 0)
        self.forwards += len(turn.accepted)
        self._proposed += sum(turn.proposed)
        self._accepted.update(turn.accepted)
        context = len(turn.prompt_ids) + 1
        for accepted, ranks in zip(turn.accepted, turn.ranks, strict=True):
            self._context_forwards[context_bin(context)] += 1
            self._context_accepted[context_bin(context)] += accepted
            for depth, rank in enumerate(ranks):
                self._ranks[depth][rank] += 1
            context += accepted + 1

    @property
    def tau(self) -> float | None:
        """Emitted tokens per forward; None before the first forward."""
        return self._drafting_tokens / self.forwards if self.forwards else None

    @property
    def accepted_per_position(self) -> list[int]:
        """At [i], the forwards that accepted positions 0..i."""
        return [
            sum(count for accepted, count in self._accepted.items() if accepted > i)
            for i in range(self._depth)
        ]

    @property
    def hit_rate(self) -> list[float]:
        """Joint, by position."""
        return [hits / self.forwards for hits in self.accepted_per_position if self.forwards]

    @property
    def conditional_hit_rate(self) -> list[float | None]:
        """By position; None where no forward came so far."""
        reached = [self.forwards, *self.accepted_per_position]
        return [hits / before if before else None for before, hits in itertools.pairwise(reached)]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        per_position = self.accepted_per_position
        num_drafts = self.forwards if self._depth else 0
        return {
            "rows": self.rows,
            "failed": self.failed,
            "skipped": self.skipped,
            "truncated": self.truncated,
            "turns": self.turns,
            "tokens": self.tokens,
            "target_forwards": self.forwards,
            "tau": self.tau,
            "extra_tokens": None if self.tau is None else self.tau - 1,
            "hit_rate": self.hit_rate,
            "conditional_hit_rate": self.conditional_hit_rate,
            "accepted_histogram": [self._accepted[k] for k in range(self._depth + 1)],
            "accepted_ranks": [
                [ranks[k] for k in range(max(ranks, default=-1) + 1)] for ranks in self._ranks
            ],
            "by_context": [
                {
                    "from": start,
                    "to": 2 * start if start else _FIRST_BIN,
                    "forwards": forwards,
                    "mean_accepted": self._context_accepted[start] / forwards,
                }
                for start, forwards in sorted(self._context_forwards.items())
            ],
            # The same by vLLM's names.
            "num_drafts": num_drafts,
            "num_draft_tokens": self._proposed,
            "num_accepted_tokens": sum(per_position),
            "num_accepted_tokens_per_pos": per_position,
            "mean_acceptance_length": 1 + sum(per_position) / num_drafts if num_drafts else None,
        }


def context_bin(length: int) -> int:
    """Return the start of the bin of a context length: 0, 64, 128, 256, and so on.

    Example: 63 lies in the bin from 0, 64 and 127 in that from 64, 128 in that from 128.
    """
    return 0 if length < _FIRST_BIN else 1 << (length.bit_length() - 1)
