"""What this machine can do at best: the floors that a step is compared with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array
from clover_jax.timing.turns import time_in_turns

READ_BYTES = 256 * 2**20  # far beyond any cache
COPY_BYTES = 2**30
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    bandwidth: bytes a second: on CPU what one thread reads, since a one-token forward is one
        thread's work there; elsewhere read and written by a copy on the device.
    matrix_rate: floating point operations a second of a large product in the run's dtype.
    """

    bandwidth: float
    matrix_rate: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Return the seconds that such work takes at least."""
        return max(num_bytes / self.bandwidth, flops / self.matrix_rate)


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Measure this machine."""
    is_cpu = jax.default_backend() == "cpu"
    bandwidth = _read_bandwidth() if is_cpu else _copy_bandwidth()
    return Ceilings(bandwidth, _matrix_rate(dtype, 1536 if is_cpu else 8192))


def _read_bandwidth() -> float:
    """Return the best of several reductions by numpy, which uses one thread for each of them."""
    floats = np.ones(READ_BYTES // 4, np.float32)
    words = floats.view(np.uint64)
    runs = {
        "max": floats.max,
        "or": lambda: np.bitwise_or.reduce(words),
        "sum": words.sum,
    }
    return READ_BYTES / min(time_in_turns(runs, ROUNDS).values())


def _copy_bandwidth() -> float:
    source = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    (seconds,) = time_in_turns({"copy": lambda: copy(source)}, ROUNDS).values()
    return 2 * COPY_BYTES / seconds


def _matrix_rate(dtype: jnp.dtype, size: int) -> float:
    def product(a: Array, b: Array) -> Array:
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(product)
    (seconds,) = time_in_turns({"product": lambda: multiply(a, a)}, ROUNDS).values()
    return 2 * size**3 / seconds
