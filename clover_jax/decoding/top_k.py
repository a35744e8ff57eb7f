"""The k largest logits over a large vocabulary, in two stages."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int, typed

CHUNK = 1024


class TopK(NamedTuple):
    """values: [..., k] in descending order; ids: [..., k], the lowest id first among equals."""

    values: Array
    ids: Array


@typed
def top_k(logits: Float[Array, "*b V"], k: int) -> TopK:
    """Return the k largest logits: of each chunk first, then of the chunks' candidates.

    Chunks are contiguous and lax.top_k prefers the lower index, so ties come out as from one
    lax.top_k over the whole axis.
    """
    vocabulary = logits.shape[-1]
    rows = logits.reshape(-1, vocabulary)  # GPUs have a kernel for rank 2 only, else they sort
    one_stage, two_stages = (functools.partial(f, k=k) for f in (_one_stage, _two_stages))
    if vocabulary < 4 * CHUNK or k > CHUNK // 4:
        found = one_stage(rows)
    else:  # on TPU one stage is faster: 45 against 76 us for 16 rows of 128k (compiler's estimate)
        found = jax.lax.platform_dependent(rows, tpu=one_stage, default=two_stages)
    return TopK(*(x.reshape(*logits.shape[:-1], k) for x in found))


def _one_stage(rows: Float[Array, "R V"], k: int) -> TopK:
    return TopK(*jax.lax.top_k(rows, k))


def _two_stages(rows: Float[Array, "R V"], k: int) -> TopK:
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % CHUNK)), constant_values=-jnp.inf)
    num_chunks = rows.shape[1] // CHUNK
    values, ids = jax.lax.top_k(rows.reshape(-1, CHUNK), k)
    offset = CHUNK * (jnp.arange(len(ids)) % num_chunks)
    ids = (ids + offset[:, None]).reshape(-1, num_chunks * k)
    best, where = jax.lax.top_k(values.reshape(-1, num_chunks * k), k)
    return TopK(best, jnp.take_along_axis(ids, where, axis=-1))


@typed
def argmax(logits: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """Return the id of the largest logit, the lowest among equals.

    On CPU top_k is 3x faster; on TPU it would sort (2.7x slower), on GPU likewise.
    """
    return jax.lax.platform_dependent(
        logits,
        cpu=lambda x: top_k(x, 1).ids[..., 0],
        default=lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32),
    )
