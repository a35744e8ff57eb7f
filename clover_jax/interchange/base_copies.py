"""Checks that a foreign head belongs to the base: its widths, and its copies of base matrices."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from clover_jax.config import DrafterConfig
from clover_jax.errors import UserError
from clover_jax.models.int8 import Int8Matrix, Matrix, widen
from clover_jax.pretrained.base import BaseModel

_CHECKED_ROWS = 4096
MATRIX_NAMES = {"lm_head": "output matrix", "embedding": "input embedding"}


def check_widths(config: DrafterConfig, base: BaseModel, directory: Path) -> None:
    """Raise UserError where the head's vocabulary or width is not the base's."""
    pairs = {
        "vocab_size": (config.vocab_size, base.config.vocab_size),
        "hidden_size": (config.layer.hidden_size, base.config.hidden_size),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise UserError(
                f"{directory}: the head's {name} is {found}, that of the base {base.source} is "
                f"{wanted}; give the base that the head was trained for"
            )


def check_copy(
    name: str, stored: np.ndarray, ours: Matrix, matrix: str, base: BaseModel, directory: Path
) -> None:
    """Raise UserError where a stored copy of a base's matrix is not that matrix.

    matrix: what `ours` is called in the message.
    Compared to a bfloat16 rounding, as the head may be stored in another dtype than the base, and
    to half a step where the base's is rounded to int8.
    """
    for start in range(0, stored.shape[0], _CHECKED_ROWS):
        rows = ours[start : start + _CHECKED_ROWS]
        mine = np.asarray(widen(rows, jnp.float32)).astype(np.float32)
        half = 0.5 * np.asarray(rows.step) if isinstance(rows, Int8Matrix) else 0.0
        theirs = stored[start : start + _CHECKED_ROWS].astype(np.float32)
        differs = np.abs(theirs - mine) > 2.0**-7 * np.abs(mine) + half + 1e-6
        if differs.any() or np.isnan(theirs).any():
            row = start + int(np.argmax((differs | np.isnan(theirs)).any(axis=1)))
            raise UserError(
                f"{directory}: {name} differs from the {matrix} of the base {base.source} "
                f"(first in row {row}); give the base that the head was trained for"
            )
