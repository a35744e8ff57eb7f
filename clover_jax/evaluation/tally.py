"""The figures of a method's rows: tau, hit rates, histograms, copies, acceptance by context length.

`decoding.requests.AcceptedLengths` has the definitions. The figures of all tasks are sums over all of
their forwards (a micro-average), so a task with long answers counts more.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from clover_jax.decoding.requests import AcceptedLengths
from clover_jax.evaluation.rows import TurnRow, turns_of
from clover_jax.generation.row_totals import RowTotals

_FIRST_BIN = 64
_NGRAM = 8  # tokens in a row that are a repeat where they occurred before


class Tally(RowTotals):
    """Sums over output rows of one method: those that `generate` reports, and many more."""

    def __init__(self, depth: int):
        """Start from nothing; depth: of the method's tree, 0 for plain decoding."""
        super().__init__()
        self.truncated = self.turns = 0
        self._depth, self._proposed = depth, 0
        self._ranks: list[collections.Counter[int]] = [collections.Counter() for _ in range(depth)]
        self._context_forwards: collections.Counter[int] = collections.Counter()
        self._context_accepted: collections.Counter[int] = collections.Counter()
        # None until a row brings a count: trees without copies have none.
        self._copied: int | None = None
        self._ngrams = self._repeated = 0
        self._by_looping = {True: AcceptedLengths(), False: AcceptedLengths()}
        self._num_looping = 0

    def add(self, row: dict[str, Any]) -> None:
        """Count an output row."""
        # A row of several turns counts once there, and each of its turns below.
        super().add(row)
        turns = list(turns_of(row))
        self.truncated += any(turn.num_cut for turn in turns)
        for turn in turns:
            self._add_turn(turn)

    def _add_turn(self, turn: TurnRow) -> None:
        self.turns += 1
        self._proposed += sum(turn.proposed)
        if turn.copied:
            self._copied = (self._copied or 0) + sum(turn.copied)

        # Copies gain most where a text repeats itself, so such answers are counted apart.
        repeated, ngrams = count_repeats(turn.prompt_ids, turn.output_ids)
        # At least half of the 8-grams.
        is_looping = 0 < ngrams <= 2 * repeated
        self._repeated += repeated
        self._ngrams += ngrams
        self._num_looping += is_looping
        # What a limit or an end cut is part of the accepted lengths, not of tau.
        self._by_looping[is_looping].add(len(turn.output_ids), turn.accepted)

        # Each forward sees the prompt, prefill's token, and what the forwards before it emitted.
        context = len(turn.prompt_ids) + 1
        for accepted, ranks in zip(turn.accepted, turn.ranks, strict=True):
            self._context_forwards[context_bin(context)] += 1
            self._context_accepted[context_bin(context)] += accepted
            # One rank for each accepted token, that of the root's child first.
            for depth, rank in enumerate(ranks):
                self._ranks[depth][rank] += 1
            context += accepted + 1

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        lengths, depth = self._lengths, self._depth
        # Plain decoding drafts nothing, so its forwards are no drafts.
        per_position = lengths.reaching(depth)
        num_drafts = lengths.forwards if depth else 0
        return {
            "rows": self.rows,
            "failed": self.failed,
            "skipped": self.skipped,
            "truncated": self.truncated,
            "turns": self.turns,
            "tokens": lengths.tokens,
            "target_forwards": lengths.forwards,
            "tau": self.tau,
            "extra_tokens": None if self.tau is None else self.tau - 1,
            "hit_rate": lengths.hit_rate(depth),
            "conditional_hit_rate": lengths.conditional_hit_rate(depth),
            "accepted_histogram": lengths.histogram(depth),
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
            "copied_tokens": self._copied,
            "repeats": {
                "ngrams": self._ngrams,
                "repeated": self._repeated,
                "looping_turns": self._num_looping,
                "tau_looping": self._by_looping[True].tau,
                "tau_not_looping": self._by_looping[False].tau,
            },
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
    # Bins double: acceptance changes with the scale of a context, not with single tokens.
    return 0 if length < _FIRST_BIN else 1 << (length.bit_length() - 1)


def count_repeats(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many 8-grams of an answer occurred before in prompt and answer, and how many are.

    Example: after the prompt 1 .. 9 the answer 1 .. 9 has 2 of 2; 9 sevens after another prompt
    have 1 of 2, the first being new.
    """
    row = [*prompt_ids, *output_ids]
    before, repeated = set(), 0
    for end in range(_NGRAM, len(row) + 1):
        ngram = tuple(row[end - _NGRAM : end])
        # One that begins in the prompt is not the answer's own.
        repeated += end - _NGRAM >= len(prompt_ids) and ngram in before
        before.add(ngram)
    return repeated, max(len(output_ids) - _NGRAM + 1, 0)
