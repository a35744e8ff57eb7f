"""The official Clover-2 layout: config.json with a "clover" object beside model.safetensors.

Source: the authors' release. Its readers rotate with base 10 000 whatever `rope_theta` says, so a
head read from this layout does so too, and one trained with another base cannot be written.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from clover_jax.array_types import Params
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.files import atomic_directory
from clover_jax.interchange.base_copies import check_copy, check_widths
from clover_jax.interchange.clover2_config import (
    ROPE_THETA,
    check_exportable,
    config_fields,
    read_config,
)
from clover_jax.interchange.clover2_tensors import clover2_leaves
from clover_jax.models.base import BaseModel
from clover_jax.models.loading import place_as
from clover_jax.models.tensor_files import SINGLE, TensorFiles
from clover_jax.models.tensor_map import assemble, stored_shapes, take_apart

# Frozen copies of the base's output matrix.
COPIES = ("lm_head.weight", "clover_embed_tokens.weight")


def read_clover2(
    directory: Path,
    base: BaseModel,
    dtype: jnp.dtype = jnp.float32,
    rope_theta: float | None = None,
    allow_base_mismatch: bool = False,
) -> tuple[Clover2Config, Params]:
    """Read a head in the official layout.

    rope_theta: rotary base to use in place of the layout's 10 000.
    allow_base_mismatch: ignore what the head's copies of the output matrix hold.
    Raises UserError naming a missing, extra or misshapen tensor, or where the head's copies of
        the output matrix are not the base's.
    """
    config = read_config(directory / "config.json", rope_theta or ROPE_THETA)
    check_widths(config, base, directory)
    files = TensorFiles(directory)
    leaves = clover2_leaves(config)
    copies = dict.fromkeys(COPIES, (config.vocab_size, config.layer.hidden_size))
    files.check(stored_shapes(leaves) | copies)
    for name in () if allow_base_mismatch else COPIES:
        check_copy(name, files.read(name), base.lm_head, "output matrix", base, directory)
    return config, assemble(leaves, files.read, place_as(dtype))


def write_clover2(directory: Path, config: Clover2Config, params: Params, base: BaseModel) -> None:
    """Write a head in the official layout, atomically, in the dtype of its params.

    Raises UserError for a head whose rotary base is not the layout's.
    """
    check_exportable(config)
    tensors = take_apart(clover2_leaves(config), params)
    dtype = next(iter(tensors.values())).dtype
    output_matrix = np.asarray(base.lm_head).astype(dtype)
    tensors |= dict.fromkeys(COPIES, output_matrix)
    fields = config_fields(config, base.config)
    with atomic_directory(directory) as unfinished:
        save_file(tensors, unfinished / SINGLE, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
