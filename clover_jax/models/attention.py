"""Attention of T fresh positions over two parts: a committed cache and the fresh rows themselves.

One softmax over both parts, computed as a running softmax: first the fresh rows under their own
mask (causal, packed or tree), then the cache in chunks, masked at each row's length. The fresh
keys and values stay outside the cache until they are accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.models.cache import KeyValue
from clover_jax.models.score_rules import MASKED, ScoreRules, scaled

CACHE_CHUNK = 256  # a cache's length is a multiple of this


@dataclasses.dataclass(frozen=True)
class CacheReadPolicy:
    """How a platform reads the committed cache: what its compiler does best with.

    most_scores: bytes of float32 scores of a chunk of the cache; None: chunks of CACHE_CHUNK.
    stops_early: whether chunks beyond the longest row stay unread: the trip count is data.
    keeps_query: whether the fresh rows' product is kept apart from the cache's.
    stores_weights: whether weights are stored, instead of computed for sum and product each.
    rows_scores: bytes of float32 scores that rows of the batch may have at a time; None takes all
        rows at once. Scores of one row that are more are one group.
    """

    most_scores: int | None = None
    stops_early: bool = True
    keeps_query: bool = False
    stores_weights: bool = False
    rows_scores: int | None = None

    def rows_at_once(self, batch: int, scores_of_row: int) -> int:
        """Return how many of `batch` rows, of this many scores each, are read together."""
        if self.rows_scores is None:
            return batch
        return min(max(self.rows_scores // (4 * scores_of_row), 1), batch)

    def chunk_of(self, size: int, num_queries: int) -> int:
        """Return the positions read at a time of a cache of `size`, for B K G T queries."""
        if self.most_scores is None:
            return min(CACHE_CHUNK, size)
        if size <= CACHE_CHUNK or size % CACHE_CHUNK:
            return size
        whole = size // CACHE_CHUNK
        # Two turns at least: a TPU would write a small cache that it has read whole back whole.
        most = whole // 2 if self.stops_early else whole
        most = min(most, self.most_scores // (4 * num_queries * CACHE_CHUNK))
        return CACHE_CHUNK * next((n for n in range(most, 1, -1) if whole % n == 0), 1)


# On GPU a trip count that depends on data makes the device wait for the host, a slice of the cache
# is copied before its product, and every kernel costs its launch: the whole cache at once. Products
# that share the query are merged, and for that the cache is copied to lie next to the fresh rows.
# Scores and weights are stored between kernels: a few rows' take little memory, and 48 MiB
# of them stay in an H200's cache. A group of rows is a part of the cache with constant bounds,
# which is read where it lies.
# On TPU every chunk has its overhead, and scores that do not fit in the core's memory are spilled.
# By the compiler's estimate for a v6e, Llama 3, 26 slots and 2048 positions, a layer takes 42
# instead of 106 microseconds at batch 1 and 359 instead of 548 at batch 16.
_GPU = CacheReadPolicy(most_scores=2**27, stops_early=False, keeps_query=True, rows_scores=2**25)
READ_POLICIES = {
    "cpu": CacheReadPolicy(),
    "cuda": _GPU,
    "rocm": _GPU,
    "tpu": CacheReadPolicy(most_scores=2**25, stores_weights=True),
}


class RunningSoftmax(NamedTuple):
    """A softmax over the keys seen so far.

    peak:  [B, K, G, T]    largest score.
    total: [B, K, G, T]    sum of exp(score - peak).
    mixed: [B, K, G, T, H] sum of exp(score - peak) * value.
    """

    peak: Array
    total: Array
    mixed: Array


# A kernel (`KeyValue.reader`): (query, cache, length, rules) -> the sums over the cache, or None
# where it does not support the rules
CacheReader = Callable[[Array, KeyValue, Array, ScoreRules | None], RunningSoftmax | None]


def attend(
    query: Float[Array, "B K G T H"],
    fresh: KeyValue,
    fresh_mask: Bool[Array, "B T S"],
    cache: KeyValue | None = None,
    length: Int[Array, " B"] | None = None,
    rules: ScoreRules | None = None,
) -> Float[Array, "B K G T H"]:
    """Attend from each fresh position to the allowed fresh positions and the committed cache.

    query: rotated queries, not yet scaled.
    fresh: [B, K, T, H] keys and values of the fresh positions.
    fresh_mask: [b, t, s] True where t may attend to s; each t must allow at least itself.
    cache, length: [B, K, S, H] committed keys and values, of which the first length[b] are live.
    rules: what else the layer does to its scores; None where that is nothing.
    """
    groups = query.shape[2]
    if cache is not None and rules is None and groups > 1:
        # To a key head all queries of its group are alike. As one axis they lie dense on a TPU,
        # which pads the T of each to a multiple of 8.
        flat = query.reshape(*query.shape[:2], 1, -1, query.shape[-1])
        mask = jnp.tile(fresh_mask, (1, groups, 1))
        return attend(flat, fresh, mask, cache, length).reshape(query.shape)

    # Where a kernel reads the cache, its result is merged with the fresh rows.
    if cache is not None and rules is None and cache.reader is not None:
        assert length is not None  # a cache and its lengths come together
        seen = cache.reader(query, cache, length, None)
        if seen is not None:
            return _attend_after(seen, query, fresh, fresh_mask)

    # First the fresh rows, under their own mask.
    size, num_cached = query.shape[3], 0 if cache is None else cache.key.shape[2]
    # Fresh rows lie less than T apart, so a window of T or more hides none of them.
    near = rules and rules.within(size)
    scores = _scores(query, fresh.key, fresh_mask[:, None, None], near)
    if near is not None:
        scores = near.by_distance(scores, near.positions)
    peak = scores.max(axis=-1)
    weight = jnp.exp(scores - peak[..., None])
    softmax = RunningSoftmax(peak, weight.sum(axis=-1), _mix(weight, fresh.value))

    # Then the committed cache, in chunks.
    if cache is not None:
        assert length is not None
        rules = rules and rules.within(num_cached + size)
        softmax = attend_cache(query, cache, length, softmax, rules)
    return finish(softmax, query.dtype, rules)


def _attend_after(
    seen: RunningSoftmax, query: Array, fresh: KeyValue, fresh_mask: Array
) -> Float[Array, "B K G T H"]:
    """Return the weighted mean of the values that a kernel has read and of the fresh ones."""
    scores = _scores(query, fresh.key, fresh_mask[:, None, None], None)
    peak = jnp.maximum(seen.peak, scores.max(axis=-1))
    weight, shrink = jnp.exp(scores - peak[..., None]), jnp.exp(seen.peak - peak)
    # All weights are divided by their sum before the product. A TPU takes longer to divide what
    # comes out, since there each query's factor has to be spread over H lanes.
    total = seen.total * shrink + weight.sum(axis=-1)
    mixed = _mix(weight / total[..., None], fresh.value)
    return (mixed + seen.mixed * (shrink / total)[..., None]).astype(query.dtype)


def finish(
    softmax: RunningSoftmax, dtype: jnp.dtype, rules: ScoreRules | None = None
) -> Float[Array, "B K G T H"]:
    """Return the weighted mean of the values seen; sinks, if any, weigh nothing in."""
    if rules is not None and rules.sinks is not None:
        sinks = rules.sinks.astype(jnp.float32)[:, :, None]
        peak = jnp.maximum(softmax.peak, sinks)
        shrink = jnp.exp(softmax.peak - peak)
        total = softmax.total * shrink + jnp.exp(sinks - peak)
        softmax = RunningSoftmax(peak, total, softmax.mixed * shrink[..., None])
    return (softmax.mixed / softmax.total[..., None]).astype(dtype)


def attend_rows(
    query: Float[Array, "B K G T H"],
    rows: KeyValue,
    mask: Bool[Array, "*b S"],
    old: RunningSoftmax,
    rules: ScoreRules | None = None,
    positions: Int[Array, "*c S"] | None = None,
    *,
    stores_weights: bool = False,
) -> RunningSoftmax:
    """Go on over [B, K, S, H] further keys and values, where the mask allows.

    mask: broadcast against [B, K, G, T, S].
    positions: where the rows lie, which `rules` need.
    stores_weights: as `CacheReadPolicy` has it.
    """
    scores = _scores(query, rows.key, mask, rules)
    if rules is not None:
        assert positions is not None
        scores = rules.by_distance(scores, positions)

    # Rescale what was summed so far to the new peak, then add these rows.
    peak = jnp.maximum(old.peak, scores.max(axis=-1))
    shrink = jnp.exp(old.peak - peak)
    weight = jnp.exp(scores - peak[..., None])
    total, weight = weight.sum(axis=-1), weight.astype(rows.value.dtype)
    if stores_weights:
        total, weight = jax.lax.optimization_barrier((total, weight))
    return RunningSoftmax(
        peak=peak,
        total=old.total * shrink + total,
        mixed=old.mixed * shrink[..., None] + _mix(weight, rows.value),
    )


def attend_cache(
    query: Float[Array, "B K G T H"],
    cache: KeyValue,
    length: Int[Array, " B"],
    softmax: RunningSoftmax,
    rules: ScoreRules | None = None,
) -> RunningSoftmax:
    """Go on over the first length[b] rows of a committed cache: with its kernel, or in chunks."""
    read_at_once = cache.reader and cache.reader(query, cache, length, rules)
    if read_at_once is not None:
        return _merge(softmax, read_at_once)

    # All platforms are traced; the compiler keeps its own.
    read = functools.partial(_read_rows, query, cache, length, rules=rules)
    paths = {name: functools.partial(read, policy=policy) for name, policy in READ_POLICIES.items()}
    return jax.lax.platform_dependent(softmax, default=paths.pop("cpu"), **paths)


def _merge(one: RunningSoftmax, other: RunningSoftmax) -> RunningSoftmax:
    """Return the softmax over the keys of both."""
    peak = jnp.maximum(one.peak, other.peak)
    ours, theirs = jnp.exp(one.peak - peak), jnp.exp(other.peak - peak)
    return RunningSoftmax(
        peak=peak,
        total=one.total * ours + other.total * theirs,
        mixed=one.mixed * ours[..., None] + other.mixed * theirs[..., None],
    )


def _read_rows(
    query: Array,
    cache: KeyValue,
    length: Array,
    softmax: RunningSoftmax,
    rules: ScoreRules | None,
    policy: CacheReadPolicy,
) -> RunningSoftmax:
    """Read one group of rows after the other."""
    if policy.keeps_query:
        query = jax.lax.optimization_barrier(query)
    if rules is not None and rules.window is not None and not policy.stops_early:
        cache, length, rules = _within_window(cache, length, rules, rules.window)
    batch, scores = query.shape[0], math.prod(query.shape[1:-1]) * cache.key.shape[2]
    at_once = policy.rows_at_once(batch, scores)
    on_mesh = jax.sharding.get_abstract_mesh().size > 1  # which splits rows and heads as it is
    if at_once == batch or on_mesh:
        return _read(query, cache, length, softmax, rules, policy)

    groups: list[RunningSoftmax] = []
    for start in range(0, batch, at_once):
        rows = slice(start, start + at_once)
        part = query[rows]
        if groups:  # one after the other: they would be fused, and their scores stored side by side
            part, groups[-1] = jax.lax.optimization_barrier((part, groups[-1]))
        keys, ends, seen = jax.tree.map(lambda x, rows=rows: x[rows], (cache, length, softmax))
        near = rules and dataclasses.replace(rules, positions=rules.positions[rows])
        groups.append(_read(part, keys, ends, seen, near, policy))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)


def _within_window(
    cache: KeyValue, length: Array, rules: ScoreRules, window: int
) -> tuple[KeyValue, Array, ScoreRules]:
    """Return of a long cache the rows that a window shows; all positions count from the first."""
    # Queries are fresh, so a row's first one sees the last window - 1 committed positions: none of
    # them with a window of 1, but a part cannot be empty.
    span = CACHE_CHUNK * math.ceil(max(window - 1, 1) / CACHE_CHUNK)
    # The part is copied: read, written and read again.
    if 3 * span > cache.key.shape[2]:
        return cache, length, rules

    start = jnp.maximum(length - span, 0)
    part = jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=span, axis=1))
    cache = jax.tree.map(lambda x: part(x, start), cache)
    # Scores depend on distances alone.
    rules = dataclasses.replace(rules, positions=rules.positions - start[:, None])
    return cache, length - start, rules


def _read(
    query: Array,
    cache: KeyValue,
    length: Array,
    softmax: RunningSoftmax,
    rules: ScoreRules | None,
    policy: CacheReadPolicy,
) -> RunningSoftmax:
    # A chunk bounds the scores that exist at a time.
    size = cache.key.shape[2]
    chunk = policy.chunk_of(size, num_queries=math.prod(query.shape[:-1]))
    if size % chunk:
        raise ValueError(f"cache length ({size}) must be a multiple of {chunk}")

    def attend_chunk(rows: KeyValue, start: Array | int, softmax: RunningSoftmax) -> RunningSoftmax:
        # What lies beyond a row's length is garbage.
        position = start + jnp.arange(chunk)
        mask = (position < length[:, None])[:, None, None, None]
        stores = policy.stores_weights
        return attend_rows(query, rows, mask, softmax, rules, position, stores_weights=stores)

    def body(index: Array, softmax: RunningSoftmax) -> RunningSoftmax:
        start = index * chunk
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=2), cache)
        return attend_chunk(rows, start, softmax)

    if size == chunk:
        return attend_chunk(cache, 0, softmax)

    # A constant number of chunks reads padding, but the host need not wait to know how many.
    if not policy.stops_early:
        return jax.lax.fori_loop(0, size // chunk, body, softmax)
    # The longest row decides how far all are read; a window, from where.
    first = 0 if rules is None else rules.first_needed(length) // chunk
    num_chunks = (jnp.max(length) + chunk - 1) // chunk
    return jax.lax.fori_loop(first, num_chunks, body, softmax)


def _scores(query: Array, key: Array, mask: Array, rules: ScoreRules | None) -> Array:
    products = jnp.einsum("bkgth,bksh->bkgts", query, key, preferred_element_type=jnp.float32)
    return jnp.where(mask, scaled(products, query.shape[-1], rules), MASKED)


def _mix(weight: Array, value: Array) -> Array:
    return jnp.einsum(
        "bkgts,bksh->bkgth", weight.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
