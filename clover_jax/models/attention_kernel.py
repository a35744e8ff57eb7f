"""Attention to a committed cache as one Pallas kernel for TPU.

    peak_t  = max_s score_ts,    total_t = sum_s exp(score_ts - peak_t),
    mixed_t = sum_s exp(score_ts - peak_t) value_s    over the live positions s of a row

Every row's keys and values are read once, up to the row's length, for all its queries: the slots
of a tree times the query heads that share a key head. The sums are partial: `attention.py`
merges them with the fresh rows, under the tree's mask.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clover_jax.array_types import Array, Float, Int
from clover_jax.models.attention import MASKED, RunningSoftmax
from clover_jax.models.cache import KeyValue

# A block of 512 positions of 8 heads of 128 entries, keys and values, is 2 MiB: enough to hide
# the overhead of a turn. By the compiler's schedules parts of 256 are summed up fastest.
BLOCK, PART = 512, 256
MOST_BYTES = 10 * 2**20  # of the 16 MiB of fast memory that kernels get on most chips
LEAST_QUERIES, MOST_QUERIES = 8, 1024  # of a head


@functools.partial(jax.jit, static_argnames=("window", "scale", "cap", "interpret"))
def read_cache(
    query: Float[Array, "B K G T H"],
    cache: KeyValue,
    length: Int[Array, " B"],
    positions: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    interpret: bool = False,
) -> RunningSoftmax:
    """Return the sums over the first length[b] rows of a cache.

    positions: of the queries, which a window needs.
    window: positions that a query sees, its own included.
    scale, cap: scores are cap * tanh(scale * query . key / cap); scale None is H^-1/2.
    interpret: run the kernel as an ordinary program, for tests.

    Jitted, so that the layers of a model trace and lower it once.
    """
    batch, num_heads, groups, slots, width = query.shape
    size, asked = cache.key.shape[2], groups * slots

    def by_row(x: Array) -> Array:
        # A product with a single query is none that the compiler for TPU takes.
        x = x.reshape(batch, -1, asked, *x.shape[4:])
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows - asked), *[(0, 0)] * (x.ndim - 3)))

    rows = max(asked, LEAST_QUERIES)
    block, heads, queries = _blocks(num_heads, rows, size, width, cache.key.dtype.itemsize)

    # A row's first block and how many it needs; the row that needs most decides for the grid, whose
    # further steps read nothing for the others.
    first = jnp.zeros_like(length)
    if window is not None:
        assert positions is not None
        first = jnp.maximum(positions.min(axis=1) - window + 1, 0) // block
    turns = jnp.maximum(jnp.max(-(-length // block) - first), 1)
    grid = (batch, num_heads // heads, pl.cdiv(rows, queries), turns)

    def of_query(row: Array, head: Array, part: Array, *_: Array) -> tuple:
        return row, head, part, 0

    def of_cache(row: Array, head: Array, _: Array, turn: Array, first: Array, length: Array):
        # An index that stays the same is not fetched again. (// does not lower in an index map.)
        last = jax.lax.div(jnp.maximum(length[row] - 1, 0), block)
        return row, head, jnp.minimum(first[row] + turn, last), 0

    rows_of_cache = pl.BlockSpec((1, heads, block, width), of_cache)
    in_specs = [pl.BlockSpec((1, heads, queries, width), of_query), rows_of_cache, rows_of_cache]
    arrays = [by_row(query), cache.key, cache.value]
    if positions is not None and window is not None:
        of_queries = jnp.broadcast_to(positions[:, None, None], (batch, 1, groups, slots))
        arrays.append(by_row(of_queries)[:, :, None])
        in_specs.append(pl.BlockSpec((1, 1, 1, queries), lambda b, k, part, *_: (b, 0, 0, part)))

    mixed, stats = pl.pallas_call(
        functools.partial(_kernel, window, width**-0.5 if scale is None else scale, cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((1, heads, queries, width), of_query),
                pl.BlockSpec((1, heads, 2, queries), lambda b, head, part, *_: (b, head, 0, part)),
            ],
            scratch_shapes=[
                pltpu.VMEM((heads, width, queries), jnp.float32),
                pltpu.VMEM((heads, 2, queries), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, 2, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(query, cache, grid),
        interpret=interpret,
        name="read_cache",
    )(first, length, *arrays)
    peak, total = (stats[:, :, i, :asked].reshape(query.shape[:-1]) for i in range(2))
    return RunningSoftmax(peak, total, mixed[:, :, :asked].reshape(query.shape))


def _blocks(num_heads: int, rows: int, size: int, width: int, itemsize: int) -> tuple[int, ...]:
    """Return how many positions, heads, and queries of a head are taken at a time."""
    block = next((b for b in (BLOCK, BLOCK // 2) if size % b == 0), size)
    queries = rows if rows <= MOST_QUERIES else MOST_QUERIES // 2
    # What is read and written lies there twice, one on its way; sums once.
    of_head = 4 * block * width * itemsize + queries * (2 * width * (itemsize + 4) + 4 * width)
    fitting = (n for n in range(num_heads, 0, -1) if num_heads % n == 0)
    return block, next((n for n in fitting if n * of_head <= MOST_BYTES), 1), queries


def _cost(query: Array, cache: KeyValue, grid: tuple) -> pl.CostEstimate:
    """Return the work for full rows: how far they go is data."""
    scores = math.prod(query.shape[:-1]) * cache.key.shape[2]
    itemsize = query.dtype.itemsize
    num_bytes = query.size * (itemsize + 4) + 2 * 4 * math.prod(query.shape[:-1])
    num_bytes += grid[2] * 2 * cache.key.size * cache.key.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * query.shape[-1], transcendentals=scores, bytes_accessed=num_bytes
    )


def _kernel(window, scale, cap, first_ref, length_ref, query_ref, key_ref, value_ref, *refs):
    # Queries lie along lanes, so that their sums are rows, and keys are summed up in registers.
    *position_ref, mixed_ref, stats_ref, sums_ref, peaks_ref = refs
    row, turn, block = pl.program_id(0), pl.program_id(3), key_ref.shape[2]
    start, length = (first_ref[row] + turn) * block, length_ref[row]
    precision = jax.lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None

    def product(x: Array, y: Array, contracted: tuple) -> Array:
        return jax.lax.dot_general(
            x, y, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def add(head: int, begin: int, size: int, masked: bool) -> None:
        scores = scale * product(
            key_ref[0, head, pl.ds(begin, size)], query_ref[0, head], ((1,), (1,))
        )
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        if masked:
            position = start + begin + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            seen = position < length
            if window is not None:
                seen = seen & (position_ref[0][0, 0] - position < window)
            scores = jnp.where(seen, scores, MASKED)

        # Rescale what was summed so far to the new peak, then add these positions.
        old = peaks_ref[head, 0:1]
        peak = jnp.maximum(old, scores.max(axis=0, keepdims=True))
        shrink, weight = jnp.exp(old - peak), jnp.exp(scores - peak)
        peaks_ref[head, 0:1] = peak
        total = weight.sum(axis=0, keepdims=True)
        peaks_ref[head, 1:2] = peaks_ref[head, 1:2] * shrink + total
        value = value_ref[0, head, pl.ds(begin, size)]
        sums_ref[head] = sums_ref[head] * shrink + product(
            value, weight.astype(value.dtype), ((0,), (0,))
        )

    def add_block(masked: bool) -> None:
        part = PART if block % PART == 0 else block
        for head in range(key_ref.shape[1]):
            for begin in range(0, block, part):
                add(head, begin, part, masked)

    @pl.when(turn == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        peaks_ref[:, 0] = jnp.full_like(peaks_ref[:, 0], MASKED)
        peaks_ref[:, 1] = jnp.zeros_like(peaks_ref[:, 1])

    # Without a window only a row's last block has positions that are not seen.
    is_masked = start < length
    if window is None:
        is_masked &= length < start + block
        pl.when(start + block <= length)(lambda: add_block(masked=False))
    pl.when(is_masked)(lambda: add_block(masked=True))

    @pl.when(turn == pl.num_programs(3) - 1)
    def _():
        stats_ref[0] = peaks_ref[...]
        for head in range(key_ref.shape[1]):
            mixed_ref[0, head] = sums_ref[head].T
