"""Weights must be numbers: one NaN makes a draft that accepts nothing and does not say why."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clover_jax.errors import UserError

_CHUNK = 2**20  # elements looked at together: they stay in the processor's cache


def check_finite(array: np.ndarray, name: str, place: Path) -> None:
    """Raise UserError naming a tensor that holds infinities or NaN; integers never do."""
    if not is_finite(array):
        raise UserError(f"{place}: tensor {name} holds values that are not finite numbers")


def is_finite(array: np.ndarray) -> bool:
    """Say whether all elements are finite; for bfloat16 ten times as fast as NumPy's own way.

    Infinities and NaN are what has every bit of the exponent set, which is infinity's own pattern.
    """
    if array.dtype.kind in "iub":
        return True
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(unsigned)
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    chunks = (bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK))
    return not any(((chunk & infinity) == infinity).any() for chunk in chunks)
