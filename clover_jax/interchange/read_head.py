"""Read a head in a layout of others into memory, by the layout's description alone."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.config import DrafterConfig
from clover_jax.interchange.base_copies import MATRIX_NAMES, check_copy, check_widths
from clover_jax.interchange.layout import Layout
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.loading import place_as
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import assemble, stored_shapes


def read_head(
    layout: Layout,
    directory: Path,
    base: BaseModel,
    dtype: jnp.dtype = jnp.float32,
    rope_theta: float | None = None,
    allow_base_mismatch: bool = False,
) -> tuple[DrafterConfig, Params]:
    """Return a head's config and params.

    rope_theta: rotary base to use in place of the layout's own.
    allow_base_mismatch: ignore what the head's copies of base matrices hold.
    Raises UserError naming a missing, extra or misshapen tensor, or a copy that is not the base's.
    """
    config = layout.read_config(directory, rope_theta, base.config)
    check_widths(config, base, directory)
    files, leaves = TensorFiles(directory), layout.leaves(config)
    copies = dict.fromkeys(layout.copies, (config.vocab_size, config.layer.hidden_size))
    further = {name: array.shape for name, array in layout.more_tensors(config).items()}
    files.check(stored_shapes(leaves) | copies | further)
    for name, which in () if allow_base_mismatch else layout.copies.items():
        ours = base.lm_head if which == "lm_head" else base.params["embedding"]
        check_copy(name, files.read(name), ours, MATRIX_NAMES[which], base, directory)
    return config, assemble(leaves, files.read, place_as(dtype))
