"""The official EAGLE-1 and -2 layout: a Llama config beside one layer and `fc`.

Source: EAGLE's repository. Its readers rotate with the config's `rope_theta`, 10 000 where there is
none, and build `fc` with a bias unless the config says `"bias": false`. `embed_tokens` is a copy of
the base's input embedding; output matrix and final norm are the base's own and not stored.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig, RopeConfig
from clover_jax.drafters.eagle import METHOD_LOSS, EagleConfig
from clover_jax.errors import UserError
from clover_jax.files import atomic_directory
from clover_jax.interchange.base_copies import check_copy, check_widths
from clover_jax.json_files import read_json_object
from clover_jax.models.base import BaseModel
from clover_jax.models.llama_config import parse_llama_config
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
    llama = parse_llama_config(values, path)
    layers = values["num_hidden_layers"]
    if layers != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1")
    rope = dataclasses.replace(llama.rope, theta=rope_theta) if rope_theta else llama.rope
    qkv_bias = bool(values.get("qkv_bias", llama.qkv_bias))
    return EagleConfig(
        layer=dataclasses.replace(llama.layer, rope=rope, qkv_bias=qkv_bias),
        vocab_size=llama.vocab_size,
        fc_bias=bool(values.get("bias", True)),
        loss=METHOD_LOSS,
    )


def config_fields(config: EagleConfig, base: BaseConfig) -> dict[str, Any]:
    """Return what config.json holds for a head of a base."""
    layer = config.layer
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": rope_scaling(layer.rope),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": list(base.eos_token_ids) or None,
        "attention_bias": layer.output_bias,
        "qkv_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "bias": config.fc_bias,
    }


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the config.json object for rotary frequencies that are not the plain ones."""
    if rope.kind == "default":
        return None
    fields = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        fields |= {name: getattr(rope, name) for name in names}
    return fields


def check_exportable(config: EagleConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {len(config.draft_to_target)} of the base's "
            f"{config.vocab_size} tokens, and the EAGLE-1 layout has no draft vocabulary; train "
            "one without --draft_vocab to export it"
        )
    if config.layer.alibi or config.layer.query_key_norm:
        raise UserError(
            f"this head has {'ALiBi' if config.layer.alibi else 'query and key norms'}, as its "
            "base has, but the EAGLE layouts hold heads of Llama's layers only"
        )


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.eagle.Eagle`'s params."""
    width = config.layer.hidden_size
    # [D, 2D] over concat(embedding, state) to fc [2, D, D].
    piece = Piece("fc.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    leaves = [Leaf(("fc",), (2, width, width), (piece,))]
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)
