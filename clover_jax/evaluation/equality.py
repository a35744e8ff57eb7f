"""Whether a draft's text equals plain decoding's, and whether a difference is only rounding.

Where a text leaves plain decoding's, the gap is the score of plain decoding's token less the score
of the other one. The threshold says how far rounding moves such differences on this base: plain
decoding reads its own text again alone, in a batch, and several tokens at once, as a tree is read,
and the largest change of its lead (best score less second best) is the threshold. A gap up to the
threshold is a near-tie; a larger one is a mismatch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Int, Params
from clover_jax.decoding.accept import keep_rows
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import options_here, repeated
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling import TOKEN, gumbel, warp
from clover_jax.decoding.state import DecodeState, bucket
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.evaluation.plan import Method, Plan, TimedPass
from clover_jax.evaluation.rows import turns_of
from clover_jax.models.cache import Cache, ordered_after, write_rows
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from clover_jax.models.delta_net import DeltaState
from clover_jax.models.placement import gathered_in_use, over_rows_and_heads
from clover_jax.models.top_k import top_k

NEAR_TIE, MISMATCH = "near-tie", "mismatch"
# The threshold is measured in a batch of at least this size, and on a few rows that do not differ
# in addition to those that do: a single row may show too little of the rounding.
_LEAST_BATCH = 8
_EQUAL_ROWS = 16
# Many kernels compute a row to the same bits in any batch. Tokens that are read at once use other
# kernels, and are attended to before they are in the cache.
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which a row differs from plain decoding's.

    index: of the row in its file. turn: number of the answer. position: of the token in it.
    expected, found: plain decoding's token and the other; None where the text had ended.
    batch_size, repeat: of the later pass that gave this text; None for the row's first.
    gap, threshold, kind: see the module. MISMATCH unless it was judged to be a NEAR_TIE.
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


Rows = Mapping[int, Mapping[str, Any]]  # output rows by their place in the input
# Row -> for each of its texts the divergence, or None where it is equal to plain decoding's. A text
# that is missing, or has no text of plain decoding to compare with, has no entry.
Comparisons = Mapping[int, Sequence[Divergence | None]]


def compare_passes(rows: Rows, passes: Iterable[TimedPass], plain: Rows) -> Comparisons:
    """Compare the text of each row's first pass, then the texts of later passes that differ."""
    compared = {number: compare_rows(row, plain[number]) for number, row in rows.items()}
    for one in passes:
        size, repeat = one.batch_size, one.repeat
        for row in one.changed:
            compared[row["row"]] += [
                again and dataclasses.replace(again, batch_size=size, repeat=repeat)
                for again in compare_rows(row, plain[row["row"]])
            ]
    return compared


def compare_rows(row: Mapping[str, Any], vanilla: Mapping[str, Any]) -> list[Divergence | None]:
    """Return the first difference of two output rows, or [None]; [] where one has no text."""
    # Text after a difference has another context, so it cannot be compared.
    pairs = list(zip(turns_of(row), turns_of(vanilla), strict=False))
    for number, (mine, plain) in enumerate(pairs):
        texts = itertools.zip_longest(plain.output_ids, mine.output_ids)
        for at, (expected, found) in enumerate(texts):
            if expected != found:
                return [Divergence(row["index"], number, at, expected, found)]
    return [None] if pairs else []


def summarize(
    comparisons: Sequence[Sequence[Divergence | None]], divergences: Sequence[Divergence]
) -> dict[str, Any]:
    """Return the counts for a report.

    comparisons: of the texts of every row. divergences: the worst of each row that has one.
    """
    compared = sum(bool(texts) for texts in comparisons)
    near_ties = sum(one.kind == NEAR_TIE for one in divergences)
    return {
        "compared": compared,
        "equal": compared - len(divergences),
        "near_ties": near_ties,
        "mismatches": len(divergences) - near_ties,
        "not_compared": len(comparisons) - compared,
    }


class Case(NamedTuple):
    """A turn of plain decoding, and where a draft left it.

    request: of the turn. output_ids: plain decoding's. divergence: None: for the threshold only.
    """

    request: Request
    output_ids: list[int]
    divergence: Divergence | None = None


def judge(
    comparisons: Comparisons, plain: Rows, plan: Plan, vanilla: Method, is_expected: bool
) -> dict[int, Divergence]:
    """Return row -> its worst divergence with its kind, for the rows that have one.

    plain: plain decoding's rows. vanilla: plain decoding, which reads them again.
    is_expected: whether the draft must emit plain decoding's tokens; where it need not, nothing is
        judged, and every divergence counts as a mismatch.
    """
    # Passes often repeat the same difference, which is judged once.
    differing: dict[tuple, Divergence] = {}
    for number, texts in comparisons.items():
        for one in filter(None, texts):
            differing.setdefault((number, one.turn, one.position, one.found), one)
    divergences = list(differing.values())

    def case(number: int, divergence: Divergence | None) -> Case:
        index = divergence.turn if divergence else 0
        turn = list(turns_of(plain[number]))[index]
        request = plan.request(plain[number]["row"], turn.prompt_ids, index)
        return Case(request, turn.output_ids, divergence)

    if divergences and is_expected:
        rows = {number for number, *_ in differing}
        equal = [number for number, texts in comparisons.items() if texts and number not in rows]
        cases = [case(number, one) for (number, *_), one in differing.items()]
        cases += [case(number, None) for number in equal[:_EQUAL_ROWS]]
        sizes = (1, max(*plan.batch_sizes, _LEAST_BATCH))
        engines = (vanilla.models.engine(size, plan.sampling, seed=plan.seed) for size in sizes)
        divergences = classify(cases, vanilla.models.base.params, *engines)

    # One mismatch makes a row a mismatch, however many near-ties it has.
    worst: dict[int, Divergence] = {}
    for (number, *_), one in zip(differing, divergences, strict=True):
        if number not in worst or one.kind == MISMATCH != worst[number].kind:
            worst[number] = one
    return worst


def classify(cases: list[Case], params: Params, alone: Engine, batched: Engine) -> list[Divergence]:
    """Return the divergences of the cases with gap, threshold and kind.

    params: the base's. alone, batched: engines of plain decoding with one slot and with many.
    """
    together, single, at_once = (
        list(read_again(cases, params, engine, width))
        for engine, width in ((batched, 1), (alone, 1), (batched, _AT_ONCE))
    )
    # The same texts read in three ways: any change is rounding. A lead is infinite at a temperature
    # next to 0, where it measures no rounding.
    threshold = 0.0
    for one, other in [*zip(together, single, strict=True), *zip(together, at_once, strict=True)]:
        known = np.isfinite(one.lead) & np.isfinite(other.lead)
        changes = np.abs(one.lead[known] - other.lead[known])
        threshold = max(threshold, float(changes.max(initial=0.0)))

    judged = []
    for case, scores in zip(cases, together, strict=True):
        found = case.divergence
        if found is None:
            continue
        # After the end of either text no score is left to compare with.
        gap = None
        if found.found is not None and found.position < len(scores.gap):
            gap = float(scores.gap[found.position])
        kind = NEAR_TIE if gap is not None and gap <= threshold else MISMATCH
        judged.append(dataclasses.replace(found, gap=gap, threshold=threshold, kind=kind))
    return judged


class Scores(NamedTuple):
    """Of plain decoding at every emitted token of a batch.

    lead: [B, n] the best score less the second. gap: [B, n] the emitted token's less the draft's.
    """

    lead: Array
    gap: Array


class Text(NamedTuple):
    """Text for plain decoding to read again.

    state: after prefill, without its KV cache. tokens: prompts and emitted tokens. rivals: a
    draft's tokens, at the positions of the answer where they were found, and 0 elsewhere.
    """

    weights: Weights
    state: DecodeState
    tokens: Int[Array, "B S"]
    rivals: Int[Array, "B n"]


def read_again(
    cases: Sequence[Case], params: Params, engine: Engine, at_once: int = 1
) -> Iterator[Scores]:
    """Teacher-force plain decoding with its own text; yield the scores [n] of each case.

    at_once: tokens that each step reads, the last ones of the text so far; the newest one counts.
    """
    placement = engine.placement
    for start in range(0, len(cases), engine.batch_size):
        group = cases[start : start + engine.batch_size]
        # The prompts are read as in decoding; from there on the text is given.
        requests = [case.request for case in group]
        state = engine.prefilled(params, None, requests)
        cache = state.cache
        if engine.config.base.delta is not None:
            cache = _cache_before(engine, params, requests, at_once)
        longest = max(len(case.output_ids) for case in group)
        tokens = np.zeros(state.tokens.shape, np.int32)
        rivals = np.zeros((engine.batch_size, bucket(longest)), np.int32)  # few sizes to compile
        for row, (request, output_ids, one) in enumerate(group):
            known = [*request.prompt_ids, *output_ids]
            tokens[row, : len(known)] = known
            if one and one.found is not None and one.position < longest:
                rivals[row, one.position] = one.found

        given = Text(
            placement.weights(Weights(params, {})),
            state.replace(cache=()),
            placement.array(tokens),
            placement.array(rivals),
        )
        none = np.zeros(rivals.shape, np.float32)
        empty = Scores(placement.array(none), placement.array(none))
        with placement.in_use():
            _, filled = _program(engine.config, at_once)(given, (cache, empty), longest)
        scores = placement.read(filled)
        for row, case in enumerate(group):
            length = len(case.output_ids)
            yield Scores(scores.lead[row, :length], scores.gap[row, :length])


def _cache_before(
    engine: Engine, params: Params, requests: Sequence[Request], at_once: int
) -> Cache:
    """Return caches of all but the last tokens of prompts, which `add_scores` reads at first.

    Keys and values may be written again, but a state must stand before the first token to read.
    """
    # At least one token is read; the states of prompts as short as that begin empty.
    shorter = []
    for each in requests:
        kept = max(len(each.prompt_ids) - at_once, 1)
        room = each.max_new_tokens + len(each.prompt_ids) - kept
        ids = each.prompt_ids[:kept]
        shorter.append(dataclasses.replace(each, prompt_ids=ids, max_new_tokens=room))
    cache = engine.prefilled(params, None, shorter).cache
    lengths = [len(each.prompt_ids) for each in requests]
    lengths += [0] * (engine.batch_size - len(lengths))
    begun = engine.placement.array(np.array(lengths) > at_once)
    empty = functools.partial(jax.tree.map, lambda x: keep_rows(begun, x, jnp.zeros_like(x)))
    return tuple(empty(layer) if isinstance(layer, DeltaState) else layer for layer in cache)


@functools.cache  # or every draft would compile it again
def _program(config: StepConfig, at_once: int) -> Callable[..., tuple[Cache, Scores]]:
    return repeated(functools.partial(add_scores, config, at_once), compiler_options=options_here())


def add_scores(
    config: StepConfig, at_once: int, given: Text, carry: tuple[Cache, Scores], number: Array
) -> tuple[Cache, Scores]:
    """Do one step of plain decoding, teacher-forced, and add its scores."""
    (weights, state, tokens, rivals), (cache, scores_so_far) = given, carry
    weights = gathered_in_use(weights)
    # From the prompt's last token on, so that the first emitted one has scores too.
    newest = jnp.clip(state.length - 1 + number, 0, tokens.shape[1] - 1)
    start = jnp.maximum(newest - at_once + 1, 0)

    # The code that verifies trees is not used: a fault in it must not pass as rounding.
    read = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (at_once,)))
    positions, mask = start[:, None] + jnp.arange(at_once), causal_mask(len(tokens), at_once)
    output: Any = Decoder(config.base).apply(
        {"params": weights.base}, read(tokens, start), positions, mask, cache, start
    )
    index = (newest - start)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden["post_norm"], index, axis=1)
    logits = base_logits(config.base, weights.base, hidden)[:, 0]
    # Scores whose argmax is the next token, before top-k and top-p cut any: logits / temperature +
    # the position's noise, or the logits at temperature 0.
    scores, rows = logits, state.sampling
    if config.sampling.verify != "greedy":
        noise = gumbel(rows, (newest + 1)[:, None], TOKEN, logits.shape[-1])[:, 0]
        noisy = warp(logits[:, None], rows, truncate=False)[:, 0] + noise
        scores = jnp.where(rows.temperature[:, None] > 0, noisy, logits)

    best = top_k(scores, 2).values
    emitted = jnp.take_along_axis(tokens, jnp.minimum(newest + 1, tokens.shape[1] - 1)[:, None], 1)
    pair = jnp.concatenate([emitted, rivals[:, number, None]], axis=1)
    score = jnp.take_along_axis(scores, pair, axis=1)
    # The best score is not the emitted token's where top-k or top-p cut a better one.
    new = Scores(best[:, 0] - best[:, 1], jnp.abs(score[:, 0] - score[:, 1]))
    filled = jax.tree.map(lambda rows, one: rows.at[:, number].set(one), scores_so_far, new)
    # The cache is written only after the scores that need it as it was.
    write_at = ordered_after(start, scores)
    # States move to the first token of the next step.
    count = jnp.maximum(newest + 2 - at_once, 0) - start
    return over_rows_and_heads(write_rows, cache, output.fresh, write_at, count), filled
