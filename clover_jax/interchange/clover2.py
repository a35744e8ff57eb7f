"""The official Clover-2 layout: config.json with a "clover" object beside model.safetensors.

Source: the authors' release. Its readers rotate with base 10 000 whatever `rope_theta` says, so a
head read from this layout does so too, and one trained with another base cannot be written.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from clover_jax.array_types import Params
from clover_jax.config import LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.errors import UserError
from clover_jax.files import atomic_directory
from clover_jax.json_files import read_json_object
from clover_jax.models.base import BaseModel
from clover_jax.models.llama_config import parse_llama_config
from clover_jax.models.llama_tensors import layer_leaves, norm_leaf
from clover_jax.models.loading import place_as
from clover_jax.models.tensor_files import SINGLE, TensorFiles
from clover_jax.models.tensor_map import (
    Leaf,
    Piece,
    assemble,
    stored_shapes,
    take_apart,
    transposed,
    whole,
)

ROPE_THETA = 10_000.0
# Frozen copies of the base's output matrix.
COPIES = ("lm_head.weight", "clover_embed_tokens.weight")
_CHECKED_ROWS = 4096


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
    config = _read_config(directory / "config.json", rope_theta or ROPE_THETA)
    _check_widths(config, base, directory)
    files = TensorFiles(directory)
    leaves = clover2_leaves(config)
    copies = dict.fromkeys(COPIES, (config.vocab_size, config.layer.hidden_size))
    files.check(stored_shapes(leaves) | copies)
    for name in () if allow_base_mismatch else COPIES:
        _check_copy(name, files.read(name), base, directory)
    return config, assemble(leaves, files.read, place_as(dtype))


def write_clover2(directory: Path, config: Clover2Config, params: Params, base: BaseModel) -> None:
    """Write a head in the official layout, atomically, in the dtype of its params.

    Raises UserError for a head whose rotary base is not the layout's.
    """
    _check_exportable(config)
    tensors = take_apart(clover2_leaves(config), params)
    dtype = next(iter(tensors.values())).dtype
    output_matrix = np.asarray(base.lm_head).astype(dtype)
    tensors |= dict.fromkeys(COPIES, output_matrix)
    fields = _config_fields(config, base)
    with atomic_directory(directory) as unfinished:
        save_file(tensors, unfinished / SINGLE, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def clover2_leaves(config: Clover2Config) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.clover2.Clover2`'s params."""
    width = config.layer.hidden_size
    leaves = _attention_decoder(config.layer, "attention_decoder_1", "clover_head_mlp_rnn")
    for index in range(config.num_augmenting_layers):
        leaves += layer_leaves(config.layer, (f"augmenting_{index}",), f"layers.{index}.")
    leaves += _attention_decoder(config.layer, "attention_decoder_2", "clover_head_mlp_rnn2")
    return [
        *leaves,
        norm_leaf(("trunk_norm",), "clover_norm", width),
        norm_leaf(("head_norm",), "clover_head_norm", width),
        transposed(("projector_0",), "clover_head_mlp.weight", (width, width)),
        whole(("projector_0_bias",), "clover_head_mlp.bias", (width,)),
        _projector_1(width),
        whole(("projector_1_bias",), "clover_head_mlp2.bias", (width,)),
    ]


def _projector_1(width: int) -> Leaf:
    """Map to projector_1 [2, D, D], state first, from [D, 2D] over concat(state, token)."""
    piece = Piece("clover_head_mlp2.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    return Leaf(("projector_1",), (2, width, width), (piece,))


def _attention_decoder(config: LayerConfig, name: str, stored: str) -> list[Leaf]:
    """Map to query [D, N, H] and key_value [D, 2, N, H] with their biases."""
    width, heads = config.hidden_size, (config.num_heads, config.head_dim)
    matrix, split = (width, width), (*heads, width)

    def weight(letter: str, index: tuple = (...,)) -> Piece:
        return Piece(f"{stored}.{letter}.weight", matrix, split, (2, 0, 1), index)

    def bias(letter: str, index: tuple = (...,)) -> Piece:
        return Piece(f"{stored}.{letter}.bias", (width,), heads, (0, 1), index)

    key_value = (weight("k", np.s_[:, 0]), weight("v", np.s_[:, 1]))
    key_value_bias = (bias("k", np.s_[0,]), bias("v", np.s_[1,]))
    return [
        norm_leaf((name, "norm"), f"{stored}.input_layernorm", width),
        Leaf((name, "query"), (width, *heads), (weight("q"),)),
        Leaf((name, "query_bias"), heads, (bias("q"),)),
        Leaf((name, "key_value"), (width, 2, *heads), key_value),
        Leaf((name, "key_value_bias"), (2, *heads), key_value_bias),
    ]


def _read_config(path: Path, rope_theta: float) -> Clover2Config:
    values = read_json_object(path)
    clover = values.get("clover")
    if not isinstance(clover, dict):
        raise UserError(f'{path} has no "clover" object; it is not an official Clover-2 head')
    for name in ("num_heads", "num_layers"):
        if not isinstance(clover.get(name), int) or clover[name] < 1:
            raise UserError(
                f"{path}: clover.{name} must be a positive whole number, not {clover.get(name)!r}"
            )
    llama = parse_llama_config(values, path)
    scale = clover.get("heads_coefficient", 1.0)
    loss = LossSpec(
        regression=10.0 * scale, soft_ce=scale, decay=clover.get("decay_coefficient", 0.7)
    )
    try:
        return Clover2Config(
            layer=dataclasses.replace(llama.layer, rope=RopeConfig(theta=rope_theta)),
            vocab_size=llama.vocab_size,
            num_positions=clover["num_heads"],
            num_augmenting_layers=clover["num_layers"],
            loss=loss,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _config_fields(config: Clover2Config, base: BaseModel) -> dict[str, Any]:
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
        "max_position_embeddings": base.config.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": base.config.bos_token_id,
        "eos_token_id": list(base.config.eos_token_ids),
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "clover": {
            "num_heads": config.num_positions,
            "num_layers": config.num_augmenting_layers,
            "heads_coefficient": config.loss.soft_ce,
            "decay_coefficient": config.loss.decay,
        },
    }


def _check_exportable(config: Clover2Config) -> None:
    rope = config.layer.rope
    if rope != RopeConfig(theta=ROPE_THETA):
        raise UserError(
            f"this head rotates with base {rope.theta:g} (type {rope.kind}), but readers of the "
            f"official Clover-2 layout always use {ROPE_THETA:g} and would draft badly with it; "
            "train the head with --draft_rope_theta=10000 to export it"
        )
    if config.layer.qkv_bias != config.layer.output_bias:
        raise UserError(
            f"the official Clover-2 layout has one attention_bias for all projections, but this "
            f"head has qkv_bias {config.layer.qkv_bias} and output_bias {config.layer.output_bias}"
        )


def _check_widths(config: Clover2Config, base: BaseModel, directory: Path) -> None:
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


def _check_copy(name: str, stored: np.ndarray, base: BaseModel, directory: Path) -> None:
    """Compare to a bfloat16 rounding: the head may be stored in another dtype than the base."""
    for start in range(0, stored.shape[0], _CHECKED_ROWS):
        ours = np.asarray(base.lm_head[start : start + _CHECKED_ROWS]).astype(np.float32)
        theirs = stored[start : start + _CHECKED_ROWS].astype(np.float32)
        differs = np.abs(theirs - ours) > 2.0**-7 * np.abs(ours) + 1e-6
        if differs.any() or np.isnan(theirs).any():
            row = start + int(np.argmax((differs | np.isnan(theirs)).any(axis=1)))
            raise UserError(
                f"{directory}: {name} differs from the output matrix of the base {base.source} "
                f"(first in row {row}); give the base that the head was trained for"
            )
