"""Which implementation reads the KV cache: XLA's own, or the kernel of `attention_kernel.py`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax

from clover_jax.array_types import Array
from clover_jax.models.attention import RunningSoftmax, caches_read_by
from clover_jax.models.cache import KeyValue
from clover_jax.models.score_rules import ScoreRules
from clover_jax.sharding.placement import over_rows_and_heads


def reading(attention: str) -> contextlib.AbstractContextManager:
    """Return a context: programs traced within it read the KV caches by "xla" or "pallas"."""
    return caches_read_by({"xla": None, "pallas": _read_by_kernel}[attention])


def _read_by_kernel(
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
    positions = () if rules is None else (rules.positions,)
    return over_rows_and_heads(read, query, cache, length, *positions)
