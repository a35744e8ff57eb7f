"""A committed cache read by cuDNN's attention, for GPUs: each row up to its length, in one kernel.

XLA's own program for a GPU stores scores and weights between its kernels; cuDNN's keeps them on
chip and returns its normalizer, so that its result can be merged with the fresh rows.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int
from clover_jax.models.attention import RunningSoftmax
from clover_jax.models.cache import KeyValue
from clover_jax.models.score_rules import MASKED


def read_cache(
    query: Float[Array, "B K G T H"],
    cache: KeyValue,
    length: Int[Array, " B"],
    *,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> RunningSoftmax:
    """Return the sums over the first length[b] rows of a cache.

    scale: of the scores; None is H^-1/2.
    implementation: "xla" is the same function as an ordinary program, for tests.

    cuDNN takes 16-bit values and heads of at most 128 entries (256 from Hopper on).
    """
    # To a query all rows of the cache are alike, so a head's G T queries are one sequence, and each
    # head of each row of the batch is a sequence of its own: no array is re-laid.
    rows, width = math.prod(query.shape[:2]), query.shape[-1]
    heads = query.reshape(rows, -1, 1, width)
    key, value = (x.reshape(rows, -1, 1, width) for x in (cache.key, cache.value))
    # A row without an end is read to its first position, and that result is dropped below.
    ends = jnp.repeat(jnp.maximum(length, 1), query.shape[1])
    mean, normalizer = jax.nn.dot_product_attention(
        heads,
        key,
        value,
        scale=scale,
        key_value_seq_lengths=ends,
        implementation=implementation,
        return_residual=True,
    )

    # The mean is a sum over weights of exp(score - log of their sum), whose total is 1.
    empty = (length == 0)[:, None, None, None]
    peak = jnp.where(empty, MASKED, normalizer.reshape(query.shape[:-1]).astype(jnp.float32))
    mixed = jnp.where(empty[..., None], 0.0, mean.reshape(query.shape).astype(jnp.float32))
    return RunningSoftmax(peak, jnp.where(empty, 0.0, jnp.ones_like(peak)), mixed)
