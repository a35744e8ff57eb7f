"""The KV cache: keys and values of committed positions, one array pair per layer, never stacked.

A stacked [L, ...] cache is copied whole at every iteration of a compiled loop; separate arrays
are updated in place. Rows of a batch advance independently, so each row writes at its own length.
What lies at or beyond a row's length is garbage: it is masked when read, never cleared.

A delta net has a state of fixed size in the place of keys and values (`models/delta_net.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, PyTree
from clover_jax.config import BaseConfig, LayerConfig
from clover_jax.models.delta_net import DeltaState, empty_delta_state, move_state

# Rows of a batch, for `write_rows`: each is traced separately, and more would compile too long.
MOST_ROWS_ONE_BY_ONE = 128


class KeyValue(struct.PyTreeNode):
    """Keys and values of one layer.

    key:   [B, K, S, H] rotated keys.
    value: [B, K, S, H]
    reader: the kernel that reads them (`attention.CacheReader`); None leaves that to XLA.
    """

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]
    reader: Callable | None = struct.field(pytree_node=False, default=None)


# A `KeyValue` for each layer; of a base's layers some may have a `DeltaState`.
Cache = tuple[Any, ...]


def init_cache(
    config: LayerConfig, num_layers: int, batch: int, length: int, dtype: jnp.dtype
) -> Cache:
    """Return `num_layers` zeroed pairs for `batch` rows of `length` positions.

    Keys and values are separate buffers, so that both can be donated.
    """
    # Heads before positions, so that a row's new positions are contiguous.
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    return tuple(
        KeyValue(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))
        for _ in range(num_layers)
    )


def init_base_cache(config: BaseConfig, batch: int, length: int, dtype: jnp.dtype) -> Cache:
    """Return what a base's layers know of no text yet: `init_cache`'s pairs, or states.

    The last layers, where they read the keys and values of others, have no entry.
    """
    layers = [
        config.layer_at(index) for index in range(config.num_layers - config.num_sharing_layers)
    ]
    return tuple(
        empty_delta_state(layer.delta, batch, dtype)
        if layer.delta
        else init_cache(layer, 1, batch, length, dtype)[0]
        for layer in layers
    )


def map_key_values(function: Callable[[Any], Any], cache: PyTree) -> PyTree:
    """Apply a function to the keys and values in a cache, and leave what else lies there."""
    # Other state in a head's cache has no axis of positions.
    return _map_layers(lambda layer: jax.tree.map(function, layer), cache)


def read_with(reader: Callable | None, cache: PyTree) -> PyTree:
    """Return a cache whose keys and values are read with a kernel; None leaves that to XLA."""
    return _map_layers(lambda layer: layer.replace(reader=reader), cache)


def key_values(cache: PyTree) -> list[KeyValue]:
    """Return the keys and values in a cache, or what stands for them in a tree of its structure."""
    return list(filter(_is_key_value, jax.tree.leaves(cache, is_leaf=_is_key_value)))


def delta_states(cache: PyTree) -> list[DeltaState]:
    """Return the states of delta nets in a cache."""
    nodes = jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, DeltaState))
    return [node for node in nodes if isinstance(node, DeltaState)]


def with_delta_states(cache: PyTree, states: Sequence[DeltaState]) -> PyTree:
    """Return a cache with copies of other states of its delta nets, in the order of its layers."""
    others = iter(jax.tree.map(jnp.copy, states))
    return jax.tree.map(
        lambda node: next(others) if isinstance(node, DeltaState) else node,
        cache,
        is_leaf=lambda node: isinstance(node, DeltaState),
    )


def _map_layers(function: Callable[[KeyValue], Any], cache: PyTree) -> PyTree:
    return jax.tree.map(
        lambda node: function(node) if _is_key_value(node) else node, cache, is_leaf=_is_key_value
    )


def _is_key_value(node: Any) -> bool:
    return isinstance(node, KeyValue)


def gather_rows(fresh: Cache, index: Int[Array, "B A"]) -> Cache:
    """Select rows of freshly computed keys and values: [B, K, T, H] -> [B, K, A, H].

    The `DeltaRows` of a delta net have the same axes.

    For TPU by a product, which is exact and gives each row as the cache has it: rows that are
    looked up lie otherwise and are copied one by one, at 25 instead of 4 us for one array of 16
    rows (the compiler's estimate for a v6e).

    Example: with index [[0, 2]] the result holds slots 0 and 2 of the only row.
    """
    return jax.lax.platform_dependent(fresh, index, tpu=_by_product, default=_by_index)


def _by_index(fresh: Cache, index: Array) -> Cache:
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index[:, None, :, None], axis=2), fresh)


def _by_product(fresh: Cache, index: Array) -> Cache:
    def select(rows: Array) -> Array:
        # Each row of `chosen` has a single 1, so the product copies values exactly.
        chosen = jax.nn.one_hot(index, rows.shape[2], dtype=rows.dtype)
        # A slot that is not gathered must not matter, and 0 times its NaN or infinity would.
        rows = jnp.where(chosen.any(axis=1)[:, None, :, None], rows, 0)
        exact = jax.lax.Precision.HIGHEST  # or float32 would be rounded to bfloat16
        return jnp.einsum("bat,bkth->bkah", chosen, rows, precision=exact)

    return jax.tree.map(select, fresh)


def write_rows(
    cache: Cache,
    rows: Cache,
    start: Int[Array, " B"],
    count: Int[Array, " B"] | None = None,
    by_kernel: bool = False,
) -> Cache:
    """Write [B, K, A, H] rows at positions start[b] .. start[b] + A - 1 of each batch row.

    count: how many of the A rows are committed: a delta net's state moves past these, and cannot
        be overwritten later as keys and values are. A cache without states needs none.
    by_kernel: whether a kernel for TPU reads the cache. A single position's rows then lie otherwise
        than the cache, and are flattened first, or each is copied by itself: 2.75 us a row and
        layer. Where XLA reads, that costs more than it saves (the compiler's estimates).

    The caller guarantees start + A <= S: dynamic_update_slice would clamp and overwrite live
    positions. A vmapped dynamic_update_slice stays in place on TPU, GPU and CPU compilers where
    a scatter by indices does not. For TPU it becomes a loop over the rows, whose bookkeeping costs
    several times the writing (the compiler's estimate), so there rows are written one by one, up to
    MOST_ROWS_ONE_BY_ONE of them: every platform traces that, a row of a layer at a time.
    """

    def write(buffer: Array, new: Array) -> Array:
        # The loop over rows is only worth its tracing where the batch is small.
        arguments = (buffer, new.astype(buffer.dtype), start)
        if start.shape[0] == 1 or start.shape[0] > MOST_ROWS_ONE_BY_ONE:
            return _write_at_once(*arguments)
        write_each = functools.partial(_write_one_by_one, flat=by_kernel and new.shape[2] == 1)
        return jax.lax.platform_dependent(*arguments, tpu=write_each, default=_write_at_once)

    def extend(old: Any, new: Any) -> Any:
        if isinstance(old, DeltaState):
            if count is None:
                raise ValueError("a delta net's state needs the number of committed rows")
            return move_state(old, new, count)
        # Field by field, because the rows do not know the cache's reader.
        return old.replace(key=write(old.key, new.key), value=write(old.value, new.value))

    return tuple(map(extend, cache, rows))


def _write_at_once(buffer: Array, new: Array, start: Array) -> Array:
    update = jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, (0, s, 0)))
    return update(buffer, new, start)


def _write_one_by_one(buffer: Array, new: Array, start: Array, flat: bool) -> Array:
    shape = (1, *new.shape[1:])
    new = new.reshape(len(new), -1) if flat else new
    for row in range(start.shape[0]):
        at = (row, 0, start[row], 0)
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1].reshape(shape), at)
    return buffer


def ordered_after(
    start: Int[Array, " B"], result: Float[Array, " B *a"] | Int[Array, " B *a"]
) -> Int[Array, " B"]:
    """Return `start`, computed from `result` as well, so that a write there comes after it.

    result: activations, or token ids of a vocabulary.

    A layer's new rows exist before its attention has read the old cache. Unless the write depends
    on what was read, the compiler keeps both versions and copies the whole cache at every step
    (an optimization_barrier does not help: it is gone before copies are decided). No token is
    negative, and a row with a NaN is lost anyway, so where it writes does not matter.
    """
    # `wrong` is False but for a NaN, so 0 is added: only the dependence on `result` is wanted.
    wrong = jnp.isnan(result) if jnp.issubdtype(result.dtype, jnp.floating) else result < 0
    return start + wrong.any(axis=tuple(range(1, result.ndim)))
