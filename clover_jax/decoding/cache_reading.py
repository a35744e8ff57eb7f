"""The implementation that reads the KV cache: XLA's own, or a kernel for TPU or GPU."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int
from clover_jax.errors import UserError
from clover_jax.models.attention import CacheReader, RunningSoftmax
from clover_jax.models.cache import KeyValue
from clover_jax.models.placement import over_rows_and_heads
from clover_jax.models.score_rules import MASKED, ScoreRules


def cache_reader(attention: str) -> CacheReader | None:
    """Return the kernel of `--attention` for `cache.read_with`; None for xla."""
    return {"xla": None, "pallas": _read_with_pallas, "cudnn": _read_with_cudnn}[attention]


def resolve_attention(name: str, platform: str | None = None) -> str:
    """Map `--attention` to "xla", "pallas" or "cudnn".

    "auto" is "xla" here; `decoding/race.py` may change it on a TPU or GPU.
    platform: of the programs; None is this process's. Raises UserError for another's kernel.
    """
    platform = platform or jax.default_backend()
    if name == "pallas" and platform not in ("cpu", "tpu"):
        raise UserError("--attention=pallas is a kernel for TPU; a GPU takes xla or cudnn")
    if name == "cudnn" and platform not in ("gpu", "cuda"):
        raise UserError(f"--attention=cudnn is for NVIDIA's GPUs; {platform} takes xla or pallas")
    return "xla" if name == "auto" else name


def _read_with_pallas(
    query: Array, cache: KeyValue, length: Array, rules: ScoreRules | None
) -> RunningSoftmax | None:
    if rules is not None and rules.slopes is not None:
        return None  # ALiBi is left to XLA
    # Imported on first use, since Pallas takes half a second.
    from clover_jax.models.attention_kernel import read_cache

    # On a CPU the kernel is interpreted: slow, and good for tests.
    options: dict[str, Any] = {}
    if rules is not None:
        options = {"window": rules.window, "scale": rules.scale, "cap": rules.cap}
    compiled = functools.partial(read_cache, **options)
    paths = {"default": compiled, "cpu": functools.partial(compiled, interpret=True)}
    read = functools.partial(jax.lax.platform_dependent, **paths)
    # An array argument, not an option: on a mesh positions are split by rows, as queries are.
    positions = () if rules is None else (rules.positions,)
    return over_rows_and_heads(read, query, cache, length, *positions)


def _read_with_cudnn(
    query: Array, cache: KeyValue, length: Array, rules: ScoreRules | None
) -> RunningSoftmax | None:
    # Rules that depend on a query's position, or change a score beyond its scale, are left to XLA.
    # Sinks do not matter here: `attention.finish` adds them to the result.
    changed = rules and (rules.slopes is not None or rules.window or rules.cap)
    if changed or query.dtype.itemsize != 2:
        return None
    read = functools.partial(read_by_cudnn, scale=None if rules is None else rules.scale)
    return over_rows_and_heads(read, query, cache, length)


def read_by_cudnn(
    query: Float[Array, "B K G T H"],
    cache: KeyValue,
    length: Int[Array, " B"],
    *,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> RunningSoftmax:
    """Return the sums over the first length[b] rows of a cache, read by cuDNN's attention.

    XLA's own program for a GPU stores scores and weights between its kernels; cuDNN's keeps them on
    chip and returns its normalizer, so that its result can be merged with the fresh rows.

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
