"""What sets a family of base models apart: how its config.json reads, where its tensors lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Leaf

# From the fields of config.json, a stored tensor's name, and the tensor.
Adjust = Callable[[dict[str, Any], str, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of one architecture are read; by default as Llama's.

    parse: reads the fields of config.json, whose path is for messages; raises UserError for what
        the decoder cannot do.
    leaves: where the stored tensors lie in the params.
    adjust: what is done to a stored tensor before it is used.
    files: opens the weight files of a folder.
    ignored: names of stored tensors that no text needs, as a regular expression; "" has none.
    """

    parse: Callable[[dict[str, Any], Path], BaseConfig]
    # Fields that only some families change from Llama's.
    leaves: Callable[[BaseConfig], list[Leaf]] = base_leaves
    adjust: Adjust = lambda values, name, tensor: tensor
    ignored: str = ""
    files: Callable[[Path], TensorFiles] = TensorFiles
