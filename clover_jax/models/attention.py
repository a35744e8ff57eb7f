"""Attention of T fresh positions over two parts: a committed cache and the fresh rows themselves.

One softmax over both parts, computed as a running softmax: first the fresh rows under their own
mask (causal, packed or tree), then the cache in chunks, masked at each row's length. The fresh
keys and values stay outside the cache until they are accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.models.cache import KeyValue
from clover_jax.models.distance import Distance

CACHE_CHUNK = 256
MASKED = -1e30  # not -inf: a fully masked chunk must not give NaN


class RunningSoftmax(NamedTuple):
    """A softmax over the keys seen so far.

    peak:  [B, K, G, T]    largest score.
    total: [B, K, G, T]    sum of exp(score - peak).
    mixed: [B, K, G, T, H] sum of exp(score - peak) * value.
    """

    peak: Array
    total: Array
    mixed: Array


def attend(
    query: Float[Array, "B K G T H"],
    fresh: KeyValue,
    fresh_mask: Bool[Array, "B T T"],
    cache: KeyValue | None = None,
    length: Int[Array, " B"] | None = None,
    distance: Distance | None = None,
) -> Float[Array, "B K G T H"]:
    """Attend from each fresh position to the allowed fresh positions and the committed cache.

    query: rotated queries, not yet scaled.
    fresh: [B, K, T, H] keys and values of the fresh positions.
    fresh_mask: [b, t, s] True where t may attend to s; each t must allow at least itself.
    cache, length: [B, K, S, H] committed keys and values, of which the first length[b] are live.
    distance: a sliding window or ALiBi; None where scores do not look at the distance.
    """
    size, num_cached = query.shape[3], 0 if cache is None else cache.key.shape[2]
    # Fresh rows lie less than T apart, so a window of T or more hides none of them.
    near = distance and distance.within(size)
    scores = _scores(query, fresh.key, fresh_mask[:, None, None])
    if near is not None:
        scores = _apply_distance(near, scores, near.positions)
    peak = scores.max(axis=-1)
    weight = jnp.exp(scores - peak[..., None])
    softmax = RunningSoftmax(peak, weight.sum(axis=-1), _mix(weight, fresh.value))
    if cache is not None:
        distance = distance and distance.within(num_cached + size)
        softmax = absorb_cache(query, cache, length, softmax, distance)
    return finish(softmax, query.dtype)


def finish(softmax: RunningSoftmax, dtype: jnp.dtype) -> Float[Array, "B K G T H"]:
    """Return the weighted mean of the values seen."""
    return (softmax.mixed / softmax.total[..., None]).astype(dtype)


def absorb_rows(
    query: Float[Array, "B K G T H"],
    rows: KeyValue,
    mask: Bool[Array, "*b S"],
    old: RunningSoftmax,
    distance: Distance | None = None,
    positions: Int[Array, "*c S"] | None = None,
) -> RunningSoftmax:
    """Go on over [B, K, S, H] further keys and values, where the mask allows.

    mask: broadcast against [B, K, G, T, S].
    positions: where the rows lie, which `distance` needs.
    """
    scores = _scores(query, rows.key, mask)
    if distance is not None:
        scores = _apply_distance(distance, scores, positions)
    peak = jnp.maximum(old.peak, scores.max(axis=-1))
    shrink = jnp.exp(old.peak - peak)
    weight = jnp.exp(scores - peak[..., None])
    return RunningSoftmax(
        peak=peak,
        total=old.total * shrink + weight.sum(axis=-1),
        mixed=old.mixed * shrink[..., None] + _mix(weight, rows.value),
    )


def absorb_cache(
    query: Float[Array, "B K G T H"],
    cache: KeyValue,
    length: Int[Array, " B"],
    softmax: RunningSoftmax,
    distance: Distance | None = None,
) -> RunningSoftmax:
    """Go on over the first length[b] rows of a committed cache, in chunks."""
    size = cache.key.shape[2]
    if size <= CACHE_CHUNK:
        return _absorb_chunk(query, cache, 0, length, softmax, distance)
    if size % CACHE_CHUNK:
        raise ValueError(f"cache length ({size}) must be a multiple of {CACHE_CHUNK}")

    def body(chunk: Array, softmax: RunningSoftmax) -> RunningSoftmax:
        start = chunk * CACHE_CHUNK
        rows = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, CACHE_CHUNK, axis=2), cache
        )
        return _absorb_chunk(query, rows, start, length, softmax, distance)

    def read_live(softmax: RunningSoftmax) -> RunningSoftmax:
        num_chunks = (jnp.max(length) + CACHE_CHUNK - 1) // CACHE_CHUNK
        first = 0 if distance is None else distance.first_needed(length) // CACHE_CHUNK
        return jax.lax.fori_loop(first, num_chunks, body, softmax)

    def read_whole(softmax: RunningSoftmax) -> RunningSoftmax:
        return jax.lax.fori_loop(0, size // CACHE_CHUNK, body, softmax)

    # A data-dependent trip count leaves the padding unread, but makes a GPU wait for the host.
    return jax.lax.platform_dependent(softmax, cuda=read_whole, rocm=read_whole, default=read_live)


def _absorb_chunk(
    query: Array,
    rows: KeyValue,
    start: Array | int,
    length: Array,
    old: RunningSoftmax,
    distance: Distance | None,
) -> RunningSoftmax:
    position = start + jnp.arange(rows.key.shape[2])
    live = position < length[:, None]
    return absorb_rows(query, rows, live[:, None, None, None], old, distance, position)


def _scores(query: Array, key: Array, mask: Array) -> Array:
    scores = jnp.einsum("bkgth,bksh->bkgts", query, key, preferred_element_type=jnp.float32)
    return jnp.where(mask, scores * query.shape[-1] ** -0.5, MASKED)


def _apply_distance(distance: Distance, scores: Array, key_positions: Array) -> Array:
    if distance.slopes is not None:
        scores = scores + distance.bias(key_positions)
    if distance.window is not None:
        scores = jnp.where(distance.mask(key_positions), scores, MASKED)
    return scores


def _mix(weight: Array, value: Array) -> Array:
    return jnp.einsum(
        "bkgts,bksh->bkgth", weight.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
