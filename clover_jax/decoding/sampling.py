"""Sampling: what changes the base's logits, and randomness that depends on the text position only.

A draw at absolute position s of a row depends on the row's key, on s and on what the draw is for,
never on the slot, the batch or the step that makes it. So the same key gives the same text whether
a position was reached in one step or in another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int
from clover_jax.decoding.sampling_config import MOST_BIASED
from clover_jax.models.top_k import argmax

NO_TOKEN = 2**31 - 1  # beyond every vocabulary
MOST_ALTERNATIVES = 20  # tokens that are scored in addition to the text's own

# The keys of rows, whatever jax_default_prng_impl says: a seed's text must not depend on that.
_KEYS = "threefry2x32"

# What a draw is for; each has its own stream of randomness at a position.
TOKEN, CHILDREN, ACCEPT = 0, 1, 2


class RowBias(struct.PyTreeNode):
    """How rows change the base's logits, n tokens each.

    ids:      [B, n] tokens; beyond the vocabulary where there is none.
    values:   [B, n] what is added to their logits.
    eos_from: [B] the first position at which an EOS token may stand.
    """

    ids: Int[Array, "B n"]
    values: Float[Array, "B n"]
    eos_from: Int[Array, " B"]


class RowPenalties(struct.PyTreeNode):
    """How rows change the logits of tokens that they have already; and min_p.

    start: [B] where the answer begins. Others: [B] as in `sampling_config.SamplingParams`.
    """

    start: Int[Array, " B"]
    repetition: Float[Array, " B"]
    frequency: Float[Array, " B"]
    presence: Float[Array, " B"]
    min_p: Float[Array, " B"]


class RowSampling(struct.PyTreeNode):
    """Each row's own settings.

    key:         [B, 2] raw bits of the row's random key.
    temperature: [B] 0 is greedy.
    top_k:       [B] keep this many of the most probable tokens; 0 keeps all.
    top_p:       [B] keep a token while the mass before it is below this; 1 keeps all.
    bias, penalties: None where no row may have any.
    """

    key: Array
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    bias: RowBias | None = None
    penalties: RowPenalties | None = None


def empty_sampling(batch: int, biased: bool = False, penalized: bool = False) -> RowSampling:
    """Return greedy settings for `batch` rows, with room for biases and penalties where asked."""
    bias = RowBias(
        ids=jnp.full((batch, MOST_BIASED), NO_TOKEN, jnp.int32),
        values=jnp.zeros((batch, MOST_BIASED)),
        eos_from=jnp.zeros(batch, jnp.int32),
    )
    penalties = RowPenalties(
        start=jnp.zeros(batch, jnp.int32),
        repetition=jnp.ones(batch),
        frequency=jnp.zeros(batch),
        presence=jnp.zeros(batch),
        min_p=jnp.zeros(batch),
    )

    # Programs without biases or penalties have no such fields in their state.
    return RowSampling(
        key=jnp.zeros((batch, 2), jnp.uint32),
        temperature=jnp.zeros(batch),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch),
        bias=bias if biased else None,
        penalties=penalties if penalized else None,
    )


def row_key(seed: Int[Array, ""], numbers: Int[Array, " n"]) -> Array:
    """Return [1, 2], the key of a row by a seed and by numbers; those below 0 are left out."""
    key = jax.random.key(seed, impl=_KEYS)
    # Folded in one by one: rows or turns that differ in a number draw from different streams.
    for number in numbers:
        key = jnp.where(number < 0, key, jax.random.fold_in(key, number))
    return jax.random.key_data(key)[None]


def add_bias(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    eos: Int[Array, "B E"],
    positions: Int[Array, "#B T"],
) -> Float[Array, "B T V"]:
    """Return logits with the rows' biases added, and EOS at -inf where it is too early.

    eos: padded with negative ids. positions: where the tokens that the logits predict would stand.
    A bias depends on nothing but the position, so it defines the distribution that plain decoding
    has too, and every rule of verification is as exact as without it.
    """
    bias = rows.bias
    assert bias is not None  # as for every engine with `SamplingConfig.biased`
    batch, _, vocabulary = logits.shape
    each = jnp.arange(batch)[:, None]
    # Once for each row: all its slots have the same biases.
    added = jnp.zeros((batch, vocabulary)).at[each, bias.ids].add(bias.values, mode="drop")

    # A negative index would count from the end.
    ends = jnp.where(eos < 0, NO_TOKEN, eos)
    is_end = jnp.zeros((batch, vocabulary), bool).at[each, ends].set(True, mode="drop")
    is_early = positions < bias.eos_from[:, None]
    return jnp.where(is_early[..., None] & is_end[:, None], -jnp.inf, logits + added[:, None])


def penalize(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    text: Int[Array, "B S"],
    end: Int[Array, " B"],
    paths: Int[Array, "B T n"] | None = None,
) -> Float[Array, "B T V"]:
    """Return logits with the rows' penalties, by the tokens before each place.

    text: prompt and emitted tokens, `end` of them. paths: the drafted tokens on each slot's path,
        its own included, and NO_TOKEN. They count as if they were emitted, so a slot has the very
        distribution that plain decoding has after the same text.
    """
    penalties = rows.penalties
    assert penalties is not None  # as for every engine with `SamplingConfig.penalized`
    repetition, frequency, presence = (
        value[:, None, None]
        for value in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    batch, slots, vocabulary = logits.shape
    each, place = jnp.arange(batch)[:, None], jnp.arange(text.shape[1])

    def count(counts: Array) -> Int[Array, "B V"]:
        return jnp.zeros((batch, vocabulary), jnp.int32).at[each, text].add(counts, mode="drop")

    def apply(logits: Array, is_there: Array, answered: Array) -> Array:
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(is_there, repeated, logits)
        return logits - frequency * answered - presence * (answered > 0)

    # Once for each row: what all its slots have before them.
    is_text = place < end[:, None]
    is_there = count(is_text) > 0
    answered = count(is_text & (place >= penalties.start[:, None]))
    penalized = apply(logits, is_there[:, None], answered[:, None])
    if paths is None:
        return penalized

    # Then the few tokens of each slot's path, from its own logits, with all that comes before.
    drafted = (paths[..., None] == paths[..., None, :]).sum(axis=-1)
    own = jnp.take_along_axis(logits, paths, axis=-1, mode="clip")
    before = answered.at[each[..., None], paths].get(mode="clip")
    again = apply(own, jnp.array(True), before + drafted)
    at = each[..., None], jnp.arange(slots)[:, None], paths
    return penalized.at[at].set(again, mode="drop")


def mask_out(logits: Float[Array, "B T V"], allowed: Int[Array, "B T w"]) -> Float[Array, "B T V"]:
    """Return logits with -inf for tokens whose bit is not set; a word has the bits of 32 tokens.

    Example: words [[[5]]] allow the tokens 0 and 2.
    """
    bits = (allowed[..., None] >> jnp.arange(32)) & 1
    bits = bits.reshape(*allowed.shape[:2], -1)[..., : logits.shape[-1]]
    return jnp.where(bits == 1, logits, -jnp.inf)


def warp(logits: Float[Array, "B T V"], rows: RowSampling, truncate: bool) -> Float[Array, "B T V"]:
    """Apply temperature, top-k, top-p and min_p (Hugging Face's order); dropped tokens get -inf.

    The result is shifted, so that its largest value is 0.
    Rows at temperature 0 keep their most probable token only. A token is kept while the mass of
    the tokens before it, by descending probability, is below top_p; equal tokens stay together.
    """
    temperature = rows.temperature[:, None, None]
    # The largest is 0: quotients of logits could overflow, or lose their differences to rounding.
    below = logits - logits.max(axis=-1, keepdims=True)
    scaled = below / jnp.where(temperature > 0, temperature, 1.0)
    if truncate:
        scaled = _truncate(scaled, rows)
    if rows.penalties is not None:
        scaled = jnp.where(scaled >= jnp.log(rows.penalties.min_p)[:, None, None], scaled, -jnp.inf)
    best = argmax(logits)[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(best, 0.0, jnp.where(temperature > 0, scaled, -jnp.inf))


def _truncate(logits: Float[Array, "B T V"], rows: RowSampling) -> Float[Array, "B T V"]:
    vocabulary = logits.shape[-1]
    # One sort serves both rules.
    ranked = descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    # Top-k: the k-th largest logit is the least that stays.
    at_k = (wanted - 1)[:, None, None]
    least = jnp.take_along_axis(descending, jnp.broadcast_to(at_k, (*logits.shape[:2], 1)), -1)
    descending = jnp.where(descending >= least, descending, -jnp.inf)

    # Top-p, among what top-k has left.
    probability = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = rows.top_p[:, None, None]
    # The first token stays, be top_p as small as it may: none has any mass before it.
    kept = (before < top_p) | (before <= 0) | (top_p >= 1)
    # One bound for both, so that equal tokens stay together.
    least = jnp.maximum(least, jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True))
    # A compiler may compute logits once for the sort and again here, rounded otherwise. So what
    # lies nearer to the last that is kept than to the first that is cut is kept too.
    cut = jnp.where(ranked < least, ranked, -jnp.inf).max(axis=-1, keepdims=True)
    return jnp.where((logits >= least) | (logits > least / 2 + cut / 2), logits, -jnp.inf)


def draw(
    warped: Float[Array, "B V"], rows: RowSampling, position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draw one token per row from softmax(warped), for the text's absolute `position`."""
    noise = gumbel(rows, position[:, None], TOKEN, warped.shape[-1])[:, 0]
    return argmax(warped + noise)


def gumbel(
    rows: RowSampling, positions: Int[Array, "B T"], purpose: int, size: int
) -> Float[Array, "B T size"]:
    """Return Gumbel noise for each row and position; adding it to logits and taking the largest
    draws from their softmax (the k largest: k draws without replacement).
    """
    return _per_position(rows, positions, purpose, lambda key: jax.random.gumbel(key, (size,)))


def uniform(
    rows: RowSampling, positions: Int[Array, "B T"], purpose: int, size: int
) -> Float[Array, "B T size"]:
    """Return uniform numbers in [0, 1) for each row and position."""
    return _per_position(rows, positions, purpose, lambda key: jax.random.uniform(key, (size,)))


def _per_position(rows: RowSampling, positions: Array, purpose: int, sample) -> Array:
    def one(row_key: Array, position: Array) -> Array:
        # Neither the row's place in the batch nor the step is part of the key.
        key = jax.random.wrap_key_data(row_key, impl=_KEYS)
        return sample(jax.random.fold_in(jax.random.fold_in(key, position), purpose))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(rows.key, positions)


class Scores(struct.PyTreeNode):
    """The base's log-probabilities of the text's tokens, before temperature; N alternatives each.

    log_probability: [B, T] of the tokens themselves. at_temperature: [B, T] the same at each row's
        temperature, without top-k, top-p and min_p; 0 at temperature 0.
    top_ids, top_log_probabilities: [B, T, N] the most probable tokens, best first.
    """

    log_probability: Float[Array, "B T"]
    at_temperature: Float[Array, "B T"]
    top_ids: Int[Array, "B T N"]
    top_log_probabilities: Float[Array, "B T N"]


def score(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], rows: RowSampling) -> Scores:
    """Return the scores of tokens that follow the positions of these logits."""

    def of_tokens(log_probability: Array) -> Array:
        return jnp.take_along_axis(log_probability, tokens[..., None], axis=-1)[..., 0]

    log_probability = finite_log_softmax(logits)
    whole = warp(logits, rows.replace(penalties=None), truncate=False)
    warped = of_tokens(finite_log_softmax(whole))
    is_drawn = rows.temperature[:, None] > 0
    # A tiny base may have fewer tokens than MOST_ALTERNATIVES.
    top, ids = jax.lax.top_k(log_probability, min(MOST_ALTERNATIVES, logits.shape[-1]))
    return Scores(of_tokens(log_probability), jnp.where(is_drawn, warped, 0.0), ids, top)


def finite_log_softmax(warped: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Return log probabilities of warped logits, finite where a token was dropped."""
    return jnp.maximum(jax.nn.log_softmax(warped, axis=-1), -1e30)
