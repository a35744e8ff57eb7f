"""`--attention=auto`: the platform's kernel, where it agrees with XLA and makes a step faster."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from clover_jax.decoding.cache_reading import cache_reader
from clover_jax.decoding.programs import Placement
from clover_jax.errors import reason_of
from clover_jax.loading.decode_states import cache_size, fitting_context
from clover_jax.loading.models import Models
from clover_jax.models.attention import attend
from clover_jax.models.cache import KeyValue, read_with
from clover_jax.runtime.progress import passing_note, say
from clover_jax.timing.parts import Bench, step_part
from clover_jax.timing.turns import time_in_turns
from clover_jax.tree_search.disk_cache import remembered, timing_key

ROUNDS = 9
KERNELS = {"tpu": "pallas", "gpu": "cudnn"}  # platform -> what is compared with XLA's program
APART = {"float32": 1e-4, "bfloat16": 3e-2}  # what rounding may make of values near 1


def with_attention(
    models: Models, name: str, batch_size: int, platform: str | None = None
) -> Models:
    """Return models with the implementation of `--attention`; auto is measured on a TPU or GPU.

    platform: that of the programs; None is this process's. Several processes do not measure: their
        clocks could choose differently.
    """
    kernel = KERNELS.get(platform or jax.default_backend())
    if name != "auto" or kernel is None or jax.process_count() > 1:
        return models
    batch = Placement(models.mesh).whole_rows(batch_size)
    context = fitting_context(models, room=0)
    # The tree is in the key: it decides how many queries a step has for each row.
    key = timing_key(models, batch, context) | {"tree": models.tree.to_dict()}
    with passing_note("measuring attention"):
        trial = remembered("attention", key, lambda: compare(models, batch, context, kernel))
    say(trial["line"])
    return dataclasses.replace(models, attention=trial["attention"])


def compare(models: Models, batch: int, context: int, kernel: str) -> dict[str, str]:
    """Return the faster of the two, and a line with the reason."""

    def chosen(name: str, reason: str) -> dict[str, str]:
        return {"attention": name, "line": f"attention auto: {name}; {reason}"}

    try:
        apart = _disagreement(models, batch, context, kernel)
        if not apart < APART[str(models.dtype)]:  # or NaN
            return chosen("xla", f"{kernel} differs by {apart:.1e}")
        seconds = _step_seconds(models, batch, context, kernel)
    except Exception as error:  # compilers raise errors of every kind, and XLA's way remains
        return chosen("xla", f"{kernel} does not run here: {reason_of(error)[:200]}")

    by_kernel_ms, by_xla_ms = (1e3 * seconds[name] for name in (kernel, "xla"))
    return chosen(
        min(seconds, key=lambda name: seconds[name]),
        f"a step takes {by_kernel_ms:.3f} ms by {kernel} and {by_xla_ms:.3f} ms by xla",
    )


def _disagreement(models: Models, batch: int, context: int, kernel: str) -> float:
    """Return the largest difference between the two over a random cache of the run's shapes."""
    config, slots = models.base.config.layer, models.tree.num_slots
    size = cache_size(models, context, room=0)
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (batch, config.num_kv_heads, *shape), models.dtype)

    query = normal(config.num_groups, slots, config.head_dim)
    fresh = KeyValue(normal(slots, config.head_dim), normal(slots, config.head_dim))
    cache = KeyValue(normal(size, config.head_dim), normal(size, config.head_dim))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((slots, slots), bool)), (batch, slots, slots))
    # Rows of all lengths, from none to the whole context.
    length = jnp.linspace(context, 0, batch).astype(jnp.int32)

    def mixed(attention: str) -> jax.Array:
        committed = read_with(cache_reader(attention), cache)
        with Placement(models.mesh).in_use():
            return jax.jit(attend)(query, fresh, mask, committed, length)

    apart = mixed("xla").astype(jnp.float32) - mixed(kernel).astype(jnp.float32)
    return float(jnp.abs(apart).max())


def _step_seconds(models: Models, batch: int, context: int, kernel: str) -> dict[str, float]:
    """Return the median seconds of a step by each, alternating."""
    size = cache_size(models, context, room=0)
    runs = {}
    for name in ("xla", kernel):
        way = dataclasses.replace(models, attention=name)
        runs[name] = step_part(Bench(way, batch, size, context)).run
    with Placement(models.mesh).in_use():
        return time_in_turns(runs, ROUNDS)
