"""The fields of config.json that say which layers look back over a limited window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_jax.errors import UserError

SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(values: dict[str, Any], path: Path) -> int | None:
    """Return `sliding_window`, None where there is none.

    Raises UserError for a value that is no number of positions.
    """
    window = values.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(
            f"{path}: sliding_window must be a positive whole number or null, not {window!r}"
        )
    return window


def read_full_layers(values: dict[str, Any], num_full: int, path: Path) -> tuple[int, ...]:
    """Return the indices of the layers that see everything.

    num_full: how many of the first layers do, where `layer_types` does not list them all.
    Raises UserError for a list of another length or with another type.
    """
    num_layers, types = values["num_hidden_layers"], values.get("layer_types")
    if types is None:
        return tuple(range(min(num_full, num_layers)))
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"{path}: layer_types must list {num_layers} types, one a layer")
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise UserError(
                f"{path}: layer type {kind!r} is not supported, only {SLIDING} and {FULL}"
            )
    return tuple(index for index, kind in enumerate(types) if kind == FULL)
