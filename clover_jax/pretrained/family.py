"""What sets a family of base models apart: how its config.json reads, where its tensors lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_map import Leaf

Adjust = Callable[[str, np.ndarray], np.ndarray]


class ParseConfig(Protocol):
    """Turn the fields of config.json (and generation_config.json) into ours."""

    def __call__(
        self, values: dict[str, Any], path: Path, generation: dict[str, Any] | None = None
    ) -> BaseConfig:
        """Raise UserError, naming `path`, for what the decoder cannot do."""
        ...


def unchanged(name: str, tensor: np.ndarray) -> np.ndarray:
    """Return the tensor as it is stored."""
    return tensor


def never_adjust(values: dict[str, Any]) -> Adjust:
    """Return the adjustment of families that store tensors as they are used."""
    return unchanged


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of one architecture are read; by default as Llama's.

    parse: the reader of config.json.
    leaves: where the stored tensors lie in the params.
    adjust: from config.json's fields, what is done to a stored tensor before it is used.
    """

    parse: ParseConfig
    leaves: Callable[[BaseConfig], list[Leaf]] = base_leaves
    adjust: Callable[[dict[str, Any]], Adjust] = never_adjust
