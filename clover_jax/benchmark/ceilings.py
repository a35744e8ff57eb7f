"""Measure this machine's limits, for the floors that a step is compared with."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.timing.turns import Run, time_in_turns

READ_BYTES = 256 * 2**20  # far beyond any cache
COPY_BYTES = 2**30
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured limits: bytes a second, and operations a second of a large product.

    bandwidth: on CPU of one thread that reads, because a one-token forward is one thread's work
        there; elsewhere of a copy on the device, read and written.
    """

    bandwidth: float
    matrix_rate: float


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Measure this machine."""
    is_cpu = jax.default_backend() == "cpu"
    bandwidth = _read_bandwidth() if is_cpu else _copy_bandwidth()
    return Ceilings(bandwidth, _matrix_rate(dtype, 1536 if is_cpu else 8192))


def _read_bandwidth() -> float:
    """Return the best of several reductions by numpy, each in one thread."""
    # Which of them keeps up with the memory differs from machine to machine.
    floats = np.ones(READ_BYTES // 4, np.float32)
    words = floats.view(np.uint64)
    join = functools.partial(np.bitwise_or.reduce, words)
    runs: dict[str, Run] = {"max": functools.partial(np.max, floats), "or": join, "sum": words.sum}
    return READ_BYTES / min(time_in_turns(runs, ROUNDS).values())


def _copy_bandwidth() -> float:
    # An addition reads and writes every byte; the compiler may leave out a plain copy.
    source = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    (seconds,) = time_in_turns({"copy": lambda: copy(source)}, ROUNDS).values()
    return 2 * COPY_BYTES / seconds


def _matrix_rate(dtype: jnp.dtype, size: int) -> float:
    a = jnp.ones((size, size), dtype)
    # Sums in float32, as the step's products have them.
    multiply = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    (seconds,) = time_in_turns({"product": lambda: multiply(a, a)}, ROUNDS).values()
    # A product and a sum are two operations.
    return 2 * size**3 / seconds
