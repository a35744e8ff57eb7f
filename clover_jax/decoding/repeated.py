"""Apply a program to its own result repeatedly: in a loop on the device, or by calls.

Only the CPU loops. Other compilers handle the weights and caches of a loop worse than those of a
program's own arguments: compiled for Llama-3-8B, a TPU's keeps `gate_up` of every layer in another
layout beside the given one (8 GB), and a GPU's transposes all keys at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from clover_jax.array_types import Array, PyTree

Carry = TypeVar("Carry")


def loops_on_device() -> bool:
    """Return whether steps are repeated by a loop within one program here."""
    return jax.default_backend() == "cpu"


def repeated(
    body: Callable[[PyTree, Carry, Array], Carry], **options: Any
) -> Callable[[PyTree, Carry, int], Carry]:
    """Return a compiled function (given, carry, count) that consumes the carry.

    It applies body(given, carry, number) for the numbers from 0 to count - 1. options: of jax.jit.
    """
    # One call at a time: each program gets weights and caches as plain arguments.
    if not loops_on_device():
        step = jax.jit(body, donate_argnums=1, **options)

        def call(given: PyTree, carry: Carry, count: int) -> Carry:
            for number in range(count):
                carry = step(given, carry, np.int32(number))
            return carry

        return call

    def loop(given: PyTree, carry: Carry, count: Array) -> Carry:
        return jax.lax.fori_loop(0, count, lambda number, c: body(given, c, number), carry)

    return jax.jit(loop, donate_argnums=1, **options)
