"""What sets a family of base models apart: how its config.json reads, where its tensors lie."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Leaf

# From the fields of config.json and its path, for messages.
ParseConfig = Callable[[dict[str, Any], Path], BaseConfig]
# From the fields of config.json, a stored tensor's name, and the tensor.
Adjust = Callable[[dict[str, Any], str, np.ndarray], np.ndarray]


def unchanged(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Return the tensor as it is stored."""
    return tensor


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of one architecture are read; by default as Llama's.

    parse: the reader of config.json; raises UserError for what the decoder cannot do.
    leaves: where the stored tensors lie in the params.
    adjust: what is done to a stored tensor before it is used.
    files: opens the weight files of a folder.
    ignored: names of stored tensors that no text needs, as a regular expression; None ignores none.
    """

    parse: ParseConfig
    leaves: Callable[[BaseConfig], list[Leaf]] = base_leaves
    adjust: Adjust = unchanged
    ignored: re.Pattern[str] | None = None
    files: Callable[[Path], TensorFiles] = TensorFiles
