"""Every text of a draft beside plain decoding's: those of all passes, and which differences count.

A row is judged by the worst of its texts: the first pass gives one, and so does each later pass, at
this batch size or another, that gave a different one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.evaluation import near_ties
from clover_jax.evaluation.equality import Comparison, Divergence, compare_rows
from clover_jax.evaluation.legs import Leg
from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.rows import turns_of

# How much margins depend on the batch is seen in a batch of some size, and on some more rows than
# those that differ.
LEAST_BATCH = 8
_EQUAL_ROWS = 16

Comparisons = Mapping[int, Sequence[Comparison]]


def compare_passes(
    rows: Mapping[int, Mapping[str, Any]],
    legs: Iterable[Leg],
    plain: Mapping[int, Mapping[str, Any]],
) -> Comparisons:
    """Return row -> its first pass beside plain decoding's, then each later one that differs."""
    found = {number: [compare_rows(row, plain[number])] for number, row in rows.items()}
    for leg in legs:
        for row in leg.changed:
            again = compare_rows(row, plain[row["row"]])
            if again.divergence:
                places = {"batch_size": leg.batch_size, "repeat": leg.repeat}
                again = Comparison(True, dataclasses.replace(again.divergence, **places))
            found[row["row"]].append(again)
    return found


def classify(
    comparisons: Comparisons,
    plain: Mapping[int, Mapping[str, Any]],
    plan: Plan,
    prompts: Mapping[int, Prompt | BadPrompt],
    vanilla: Method,
) -> dict[int, Divergence]:
    """Return row -> its worst divergence with its kind, for the rows that have one.

    Where no equality is expected, nothing is judged, and every one counts as a mismatch.
    """
    found = [
        (number, divergence)
        for number, texts in comparisons.items()
        for divergence in _different(one.divergence for one in texts if one.divergence)
    ]
    if found and plan.is_equality_expected:
        differing = {number for number, _ in found}
        equal = [
            number
            for number, texts in comparisons.items()
            if texts[0].is_compared and number not in differing
        ]
        cases = [
            _case(number, divergence, plain, plan, prompts)
            for number, divergence in [*found, *((number, None) for number in equal[:_EQUAL_ROWS])]
        ]
        sizes = (1, max(*plan.batch_sizes, LEAST_BATCH))
        alone, batched = (vanilla.models.engine(size, plan.sampling, plan.seed) for size in sizes)
        judged = near_ties.classify(cases, vanilla, alone, batched)
        found = [(number, one) for (number, _), one in zip(found, judged, strict=True)]
    worst: dict[int, Divergence] = {}
    for number, divergence in found:
        if number not in worst or divergence.is_mismatch > worst[number].is_mismatch:
            worst[number] = divergence
    return worst


def _different(divergences: Iterable[Divergence]) -> list[Divergence]:
    """Return the first of those that are at the same token, as those of all repeats may be."""
    found: dict[tuple, Divergence] = {}
    for one in divergences:
        found.setdefault((one.turn, one.position, one.found), one)
    return list(found.values())


def _case(
    number: int,
    divergence: Divergence | None,
    plain: Mapping[int, Mapping[str, Any]],
    plan: Plan,
    prompts: Mapping[int, Prompt | BadPrompt],
) -> near_ties.Case:
    index = divergence.turn if divergence else 0
    turn = list(turns_of(plain[number]))[index]
    request = plan.request(prompts[number], turn.prompt_ids, index)
    return near_ties.Case(request, turn.output_ids, divergence)
