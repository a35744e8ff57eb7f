"""The official EAGLE-1 and -2 layout: a Llama config beside one layer and `fc`.

Source: EAGLE's repository. Its readers rotate with the config's `rope_theta`, 10 000 where there is
none, and build `fc` with a bias unless the config says `"bias": false`. `embed_tokens` is a copy of
the base's input embedding; output matrix and final norm are the base's own and not stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import METHOD_LOSS, EagleConfig
from clover_jax.errors import UserError
from clover_jax.files import atomic_directory
from clover_jax.interchange.base_copies import check_copy, check_widths
from clover_jax.interchange.llama_fields import check_llama_layer, llama_fields, read_layer
from clover_jax.json_files import read_json_object
from clover_jax.models.base import BaseModel
from clover_jax.models.llama_tensors import layer_leaves
from clover_jax.models.loading import place_as
from clover_jax.models.tensor_files import SINGLE, TensorFiles
from clover_jax.models.tensor_map import (
    Leaf,
    Piece,
    assemble,
    stored_shapes,
    take_apart,
    whole,
)

EMBEDDING = "embed_tokens.weight"  # a frozen copy of the base's


def read_eagle(
    directory: Path,
    base: BaseModel,
    dtype: jnp.dtype = jnp.float32,
    rope_theta: float | None = None,
    allow_base_mismatch: bool = False,
) -> tuple[EagleConfig, Params]:
    """Read a head in the official layout.

    rope_theta: rotary base to use in place of the config's.
    allow_base_mismatch: ignore what the head's copy of the embedding holds.
    Raises UserError naming a missing, extra or misshapen tensor, or where the copy is not the
        base's.
    """
    config = read_config(directory / "config.json", rope_theta)
    check_widths(config, base, directory)
    files = TensorFiles(directory)
    leaves = eagle_leaves(config)
    files.check(stored_shapes(leaves) | {EMBEDDING: (config.vocab_size, config.layer.hidden_size)})
    if not allow_base_mismatch:
        stored, ours = files.read(EMBEDDING), base.params["embedding"]
        check_copy(EMBEDDING, stored, ours, "input embedding", base, directory)
    return config, assemble(leaves, files.read, place_as(dtype))


def write_eagle(directory: Path, config: EagleConfig, params: Params, base: BaseModel) -> None:
    """Write a head in the official layout, atomically, in the dtype of its params.

    Raises UserError for a head that the layout cannot hold.
    """
    check_exportable(config)
    tensors = take_apart(eagle_leaves(config), params)
    dtype = next(iter(tensors.values())).dtype
    tensors[EMBEDDING] = np.asarray(base.params["embedding"]).astype(dtype)
    with atomic_directory(directory) as unfinished:
        # Not save_file: it makes files that only their owner may read.
        (unfinished / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))
        fields = config_fields(config, base.config)
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def read_config(path: Path, rope_theta: float | None = None) -> EagleConfig:
    """Read the head's config.

    Raises UserError for what is missing or cannot be.
    """
    return parse_config(read_json_object(path), path, rope_theta)


def parse_config(
    values: dict[str, Any], path: Path, rope_theta: float | None = None
) -> EagleConfig:
    """Turn the fields of a head's config into ours; raises as `read_config`."""
    return EagleConfig(
        layer=read_layer(values, path, rope_theta),
        vocab_size=values["vocab_size"],
        fc_bias=bool(values.get("bias", True)),
        loss=METHOD_LOSS,
    )


def config_fields(config: EagleConfig, base: BaseConfig) -> dict[str, Any]:
    """Return what config.json holds for a head of a base."""
    fields = {"architectures": ["LlamaForCausalLM"], **llama_fields(config, base)}
    return fields | {"bias": config.fc_bias}


def check_exportable(config: EagleConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {len(config.draft_to_target)} of the base's "
            f"{config.vocab_size} tokens, and the EAGLE-1 layout has no draft vocabulary; train "
            "one without --draft_vocab to export it"
        )
    check_llama_layer(config.layer)


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.eagle.Eagle`'s params."""
    width = config.layer.hidden_size
    # [D, 2D] over concat(embedding, state) to fc [2, D, D].
    piece = Piece("fc.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    leaves = [Leaf(("fc",), (2, width, width), (piece,))]
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)
