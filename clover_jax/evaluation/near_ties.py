"""Tell a near-tie from a mismatch where a draft's text leaves that of plain decoding.

In low precision the same tokens round differently in another batch or tree, and two tokens of
almost the same score can change places. Plain decoding itself shows how far scores move: it is
teacher-forced with the same text alone, in a batch, and several tokens at once, as a tree is read.
The largest change of a top-two margin is the threshold. A divergence at a smaller gap is a
near-tie; at a larger one the text is not plain decoding's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import options_here, repeated
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling import TOKEN, RowSampling, gumbel, warp
from clover_jax.decoding.state import DecodeState, bucket
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.evaluation.equality import MISMATCH, NEAR_TIE, Comparisons, Divergence
from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.rows import turns_of
from clover_jax.models.cache import Cache, ordered_after, write_rows
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from clover_jax.sharding.placement import gathered_in_use, over_rows_and_heads
from clover_jax.sharding.top_k import top_k

# How much margins depend on the batch is seen in a batch of at least this size, and on some more
# rows than those that differ.
_LEAST_BATCH = 8
_EQUAL_ROWS = 16
# A batch alone may not show it: many kernels compute a row to the same bits in any batch. Tokens
# that are read at once meet other kernels, and are attended to before the cache instead of in it.
_AT_ONCE = 16


class Case(NamedTuple):
    """A turn of plain decoding, and where a draft left it.

    request: of the turn. output_ids: tokens that plain decoding emitted. divergence: None for a
    turn that only measures how far margins depend on the batch.
    """

    request: Request
    output_ids: list[int]
    divergence: Divergence | None = None


class Margins(NamedTuple):
    """Margins of plain decoding at every emitted token.

    margin: [B, n] best score less second best. gap: [B, n] how far differences of scores must move
        for the rival, the draft's token, to be chosen.
    """

    margin: Array
    gap: Array


def judge(
    comparisons: Comparisons, plain: Mapping[int, Mapping[str, Any]], plan: Plan, vanilla: Method
) -> dict[int, Divergence]:
    """Return row -> its worst divergence with its kind, for the rows that have one.

    plain: plain decoding's rows. vanilla: plain decoding, to be teacher-forced with them.
    Where no equality is expected nothing is judged, and every divergence counts as a mismatch.
    """
    divergences = [
        (number, divergence)
        for number, texts in comparisons.items()
        for divergence in _different(one.divergence for one in texts if one.divergence)
    ]

    if divergences and plan.is_equality_expected:
        differing = {number for number, _ in divergences}
        equal = [
            number
            for number, texts in comparisons.items()
            if texts[0].is_compared and number not in differing
        ]
        # Equal rows show how far margins move; divergent ones alone may be too few for that.
        others = [(number, None) for number in equal[:_EQUAL_ROWS]]
        cases = [_case(plain[number], one, plan) for number, one in [*divergences, *others]]
        # One engine for a row alone, one for the run's largest batch or a little more.
        sizes = (1, max(*plan.batch_sizes, _LEAST_BATCH))
        engines = (vanilla.models.engine(size, plan.sampling, seed=plan.seed) for size in sizes)
        judged = classify(cases, vanilla.models.base.params, *engines)
        divergences = [(number, one) for (number, _), one in zip(divergences, judged, strict=True)]

    # One mismatch makes a row a mismatch, however many near-ties it has beside.
    worst: dict[int, Divergence] = {}
    for number, divergence in divergences:
        if number not in worst or divergence.is_mismatch > worst[number].is_mismatch:
            worst[number] = divergence
    return worst


def _different(divergences: Iterable[Divergence]) -> list[Divergence]:
    """Return the divergences without repeats of the same turn, position and token."""
    # Passes often repeat the same difference, which needs judging once.
    first: dict[tuple, Divergence] = {}
    for one in divergences:
        first.setdefault((one.turn, one.position, one.found), one)
    return list(first.values())


def _case(row: Mapping[str, Any], divergence: Divergence | None, plan: Plan) -> Case:
    """Return the turn of plain decoding's row that a draft left, or its first."""
    index = divergence.turn if divergence else 0
    turn = list(turns_of(row))[index]
    request = plan.request(row["row"], turn.prompt_ids, index)
    return Case(request, turn.output_ids, divergence)


def classify(
    cases: Sequence[Case], params: Params, alone: Engine, batched: Engine
) -> list[Divergence]:
    """Return the divergences of the cases with gap, threshold and kind.

    params: the base's. alone, batched: engines of plain decoding with one slot and with many, as
        the run has.
    """
    # The same texts beside other rows: any change is rounding.
    together = list(_margins_of(cases, batched.batch_size, params, batched))
    single = _margins_of(cases, 1, params, alone)
    wide = _margins_of(cases, batched.batch_size, params, batched, _AT_ONCE)
    # One threshold for all cases: a single row may show too little of what rounding does.
    threshold = max(
        _largest_change(one.margin, other.margin)
        for one, *others in zip(together, single, wide, strict=True)
        for other in others
    )
    return [
        _classified(case.divergence, one.gap, threshold)
        for case, one in zip(cases, together, strict=True)
        if case.divergence is not None
    ]


def _margins_of(
    cases: Sequence[Case], size: int, params: Params, engine: Engine, at_once: int = 1
) -> Iterator[Margins]:
    """Yield the margins of each case up to its end; `size` cases are computed together."""
    for start in range(0, len(cases), size):
        group = cases[start : start + size]
        found = margins(group, params, engine, at_once)
        # Each group is as wide as its longest text, and slots that it leaves empty hold nothing.
        for row, case in enumerate(group):
            length = len(case.output_ids)
            yield Margins(found.margin[row, :length], found.gap[row, :length])


def _largest_change(one: Array, other: Array) -> float:
    """Return the largest difference of two rows of margins.

    Infinite margins, of a temperature next to 0, are left out: they do not measure rounding.
    """
    is_known = np.isfinite(one) & np.isfinite(other)
    return float(np.abs(one[is_known] - other[is_known]).max(initial=0.0))


def _classified(divergence: Divergence, gaps: Array, threshold: float) -> Divergence:
    """Return a divergence with its kind; one after the end of either text has no gap."""
    if divergence.found is None or divergence.position >= len(gaps):
        return dataclasses.replace(divergence, threshold=threshold, kind=MISMATCH)
    gap = float(gaps[divergence.position])
    kind = NEAR_TIE if gap <= threshold else MISMATCH
    return dataclasses.replace(divergence, gap=gap, threshold=threshold, kind=kind)


def margins(cases: Sequence[Case], params: Params, engine: Engine, at_once: int = 1) -> Margins:
    """Teacher-force plain decoding with its own text; [B, n], and 0 beyond the longest.

    at_once: tokens that each step reads, the last of the text so far; the newest one counts.
    """
    placement = engine.placement
    # The prompts are read as in decoding; from there on the text is given.
    state = engine.prefilled(params, None, [case.request for case in cases])
    longest = max(len(case.output_ids) for case in cases)
    # Lengths in buckets, so that few programs compile.
    text = np.zeros(state.tokens.shape, np.int32)
    other = np.zeros((engine.batch_size, bucket(longest)), np.int32)
    for row, case in enumerate(cases):
        known = [*case.request.prompt_ids, *case.output_ids[:-1]]
        text[row, : len(known)] = known
        divergence = case.divergence
        if divergence and divergence.found is not None and divergence.position < longest:
            other[row, divergence.position] = divergence.found

    given = Forced(
        placement.weights(Weights(params, {})),
        state.replace(cache=()),
        placement.array(text),
        placement.array(other),
    )
    none = np.zeros(other.shape, np.float32)
    empty = Margins(placement.array(none), placement.array(none))
    with placement.in_use():
        _, filled = _program(engine.config, at_once)(given, (state.cache, empty), longest)
    return placement.read(filled)


@functools.cache  # or it would be compiled anew for every draft
def _program(config: StepConfig, at_once: int) -> Callable[..., tuple[Cache, Margins]]:
    return repeated(functools.partial(add_margin, config, at_once), compiler_options=options_here())


class Forced(NamedTuple):
    """The text that plain decoding is teacher-forced with.

    state: after prefill, without its KV cache. text: prompts and emitted tokens. other: the rival
    of each step: the draft's token, whose gap to the best is computed.
    """

    weights: Weights
    state: DecodeState
    text: Int[Array, "B S"]
    other: Int[Array, "B n"]


def add_margin(
    config: StepConfig,
    at_once: int,
    given: Forced,
    carry: tuple[Cache, Margins],
    number: Int[Array, ""],
) -> tuple[Cache, Margins]:
    """Do one step of plain decoding, teacher-forced, and add its margins."""
    (weights, state, text, other), (cache, margins_so_far) = given, carry
    weights = gathered_in_use(weights)
    rival = other[:, number]
    # From the prompt's last token on, so that the first emitted one has a margin too.
    newest = jnp.clip(state.length - 1 + number, 0, text.shape[1] - 1)
    start = jnp.maximum(newest - at_once + 1, 0)

    # None of the code that verifies trees is used: a fault of it must not pass as rounding.
    read = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (at_once,)))
    positions, mask = start[:, None] + jnp.arange(at_once), causal_mask(len(text), at_once)
    output: Any = Decoder(config.base).apply(
        {"params": weights.base}, read(text, start), positions, mask, cache, start
    )
    index = (newest - start)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden["post_norm"], index, axis=1)
    logits = base_logits(config.base, weights.base, hidden)
    scores = _scores(config, state, logits, newest + 1)

    # The margin is of plain decoding alone; the gap is of the draft's token.
    best = top_k(scores.noisy, 2).values
    new = Margins(best[:, 0] - best[:, 1], _gap(scores, rival[:, None]))
    filled = jax.tree.map(lambda rows, one: rows.at[:, number].set(one), margins_so_far, new)
    # The cache is written only after the scores that need it as it was.
    write_at = ordered_after(start, scores.noisy)
    return over_rows_and_heads(write_rows, cache, output.fresh, write_at), filled


class Scores(NamedTuple):
    """Scores whose argmax is the next token.

    noisy: logits / temperature + the position's noise, none cut; the logits at temperature 0.
    room: see `room_to_cut`.
    """

    noisy: Float[Array, "B V"]
    room: Float[Array, "B V"]


def _scores(
    config: StepConfig, state: DecodeState, logits: Float[Array, "B 1 V"], position: Array
) -> Scores:
    # Scores are compared before anything is cut: a cut token has a gap as well.
    logits, rows = logits[:, 0], state.sampling
    nothing_is_cut = jnp.full(logits.shape, jnp.inf)
    if config.sampling.verify == "greedy":
        return Scores(logits, nothing_is_cut)

    is_drawn = rows.temperature[:, None] > 0
    scaled = warp(logits[:, None], rows, truncate=False)[:, 0]
    noise = gumbel(rows, position[:, None], TOKEN, logits.shape[-1])[:, 0]
    room = room_to_cut(logits, rows) if config.sampling.truncate else nothing_is_cut
    # A row at temperature 0 takes the largest logit; its top-k and top-p have no effect.
    return Scores(
        jnp.where(is_drawn, scaled + noise, logits), jnp.where(is_drawn, room, nothing_is_cut)
    )


def _gap(scores: Scores, rival: Int[Array, "B 1"]) -> Float[Array, " B"]:
    """Return how far differences of scores must move for `rival` to be chosen."""
    score, room = (jnp.take_along_axis(each, rival, axis=-1) for each in scores)
    # Each better token must be overtaken or cut off, and the rival itself must be kept.
    lead = jnp.where(scores.noisy > score, jnp.minimum(scores.noisy - score, scores.room), 0)
    return jnp.maximum(lead.max(axis=-1), -room[:, 0])


def room_to_cut(logits: Float[Array, "B V"], rows: RowSampling) -> Float[Array, "B V"]:
    """Return each token's signed distance to the cut of top-k and top-p.

    In logits / temperature: positive if the token is kept, negative if it is cut, infinite where
    nothing is cut.
    A token changes sides where it meets the last that is kept or the first that is cut, or where
    the mass before it meets top_p: the log odds of a mass move no further than such differences.

    Example: tempered logits [2, 1.5, 1.4] and top_k 2 give [0.6, 0.1, -0.1].
    """
    # Top-k cuts first; top-p then counts the mass of the tokens that are left.
    kept_by_k = warp(logits[:, None], rows.replace(top_p=jnp.ones_like(rows.top_p)), True)[:, 0]
    is_kept = warp(logits[:, None], rows, truncate=True)[:, 0] > -jnp.inf
    scaled = warp(logits[:, None], rows, truncate=False)[:, 0]
    last = jnp.where(is_kept, scaled, jnp.inf).min(axis=-1, keepdims=True)
    first_cut = jnp.where(is_kept, -jnp.inf, scaled).max(axis=-1, keepdims=True)

    # The mass before a token; equal tokens stay together, so they have that of their first.
    order = jnp.argsort(-kept_by_k, axis=-1)
    ranked = jnp.take_along_axis(kept_by_k, order, axis=-1)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.clip(jnp.cumsum(probability, axis=-1) - probability, 0, 1)
    is_first = jnp.diff(ranked, axis=-1, prepend=jnp.inf) != 0
    before = jax.lax.cummax(jnp.where(is_first, before, 0), axis=1)
    before = jnp.take_along_axis(before, jnp.argsort(order, axis=-1), axis=-1)

    # Mass decides nothing about a token that top-k cuts, nor where top_p keeps all.
    top_p, log_odds = rows.top_p[:, None], jax.scipy.special.logit
    by_mass = jnp.where(top_p < 1, log_odds(top_p) - log_odds(before), jnp.inf)
    by_mass = jnp.where(kept_by_k > -jnp.inf, by_mass, -jnp.inf)
    return jnp.where(
        is_kept, jnp.minimum(scaled - first_cut, by_mass), jnp.maximum(scaled - last, by_mass)
    )
