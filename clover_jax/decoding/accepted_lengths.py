"""The tally of accepted lengths: tau, hit rates and the histogram of many forwards.

A forward is each time the base verified a draft; it accepts a number of drafted tokens and emits
one more of its own, the bonus. The end of an answer cuts emitted tokens, not accepted ones:

    tau = emitted tokens / forwards, after the cut; prefill's own token and forward are left out;
    joint hit rate of position i = forwards that accepted positions 0..i / forwards, before the cut;
    conditional hit rate of position i = the same among the forwards that accepted 0..i-1.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence


class AcceptedLengths:
    """Counts over answers.

    tokens: emitted ones, EOS and prefill's own included. forwards: of the base, after prefill.
    """

    def __init__(self):
        self.tokens = self.forwards = 0
        self._tokens_of_forwards = 0
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, num_tokens: int, accepted: Sequence[int]) -> None:
        """Count an answer: its emitted tokens, and how many drafted ones each forward accepted."""
        self.tokens += num_tokens
        self._tokens_of_forwards += max(num_tokens - 1, 0)  # prefill gave the first one
        self.forwards += len(accepted)
        self._counts.update(accepted)

    @property
    def tau(self) -> float | None:
        """Emitted tokens per forward; None before the first forward."""
        return self._tokens_of_forwards / self.forwards if self.forwards else None

    def histogram(self, depth: int | None = None) -> list[int]:
        """Return at [k] how many forwards accepted k tokens, up to `depth` or to the longest."""
        # -1 without any forward, so that the list is empty.
        longest = max(self._counts, default=-1) if depth is None else depth
        return [self._counts[k] for k in range(longest + 1)]

    def reaching(self, depth: int) -> list[int]:
        """Return at [i] how many forwards accepted positions 0..i, for the positions of a tree."""
        # k accepted tokens stand at positions 0 .. k - 1.
        return [sum(n for k, n in self._counts.items() if k > i) for i in range(depth)]

    def hit_rate(self, depth: int) -> list[float]:
        """Return the joint hit rates; none before the first forward."""
        return [hits / self.forwards for hits in self.reaching(depth) if self.forwards]

    def conditional_hit_rate(self, depth: int) -> list[float | None]:
        """Return the conditional hit rates; None where no forward came that far."""
        # Every forward comes as far as position 0; later ones need the position before them.
        reached = [self.forwards, *self.reaching(depth)]
        return [hits / before if before else None for before, hits in itertools.pairwise(reached)]
