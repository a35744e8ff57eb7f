"""The official Clover-2 layout: a Llama config with a "clover" object, and model.safetensors.

Source: the authors' release. Its readers ignore `rope_theta` and rotate with base 10 000, so a head
read from this layout does too, and a head trained with another base cannot be written.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import (
    Layout,
    beyond_llama,
    llama_fields,
    refuse_draft_vocabulary,
)
from clover_jax.checkpoints.llama_config import MOST_LAYERS, check_count, parse_llama_config
from clover_jax.checkpoints.llama_tensors import layer_leaves, norm_leaf
from clover_jax.checkpoints.tensor_map import Leaf, Piece, over_states, transposed, whole
from clover_jax.config import BaseConfig, LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

ROPE_THETA = 10_000.0  # used by readers of the layout, whatever the value of rope_theta
# Frozen copies of the base's output matrix.
COPIES = ("lm_head.weight", "clover_embed_tokens.weight")


def parse_config(values: dict[str, Any], path: Path, base: BaseConfig) -> Clover2Config:
    """Turn the fields of a head's config into ours."""
    clover = values.get("clover")
    if not isinstance(clover, dict):
        raise UserError(f'{path} has no "clover" object; it is not an official Clover-2 head')
    # With their full names, so that an error names the object that holds the field.
    for name in ("num_heads", "num_layers"):
        check_count({f"clover.{name}": clover.get(name)}, f"clover.{name}", path, MOST_LAYERS)
    llama = parse_llama_config(values, path)
    _check_widths(llama.head_layer)

    # The loss is kept, so that a head can be trained on and written again.
    # In the release one coefficient weighs both parts, the regression ten times as much.
    weights = {"heads_coefficient": 1.0, "decay_coefficient": 0.7} | clover
    for name in ("heads_coefficient", "decay_coefficient"):
        if not isinstance(weights[name], int | float):
            raise UserError(f"{path}: clover.{name} must be a number, not {weights[name]!r}")
    scale = weights["heads_coefficient"]
    loss = LossSpec(regression=10.0 * scale, soft_ce=scale, decay=weights["decay_coefficient"])

    # The theta of the file is ignored, as the release does.
    if llama.head_layer.rope != RopeConfig(theta=ROPE_THETA):
        say(
            f"{path}: its rotation is not read: readers of Clover-2's official layout rotate with "
            f"base {ROPE_THETA:g} (--draft_rope_theta for another)"
        )
    try:
        return Clover2Config(
            layer=dataclasses.replace(llama.head_layer, rope=RopeConfig(theta=ROPE_THETA)),
            vocab_size=llama.vocab_size,
            num_positions=clover["num_heads"],
            num_augmenting_layers=clover["num_layers"],
            loss=loss,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def config_fields(config: Clover2Config, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    clover = {
        "num_heads": config.num_positions,
        "num_layers": config.num_augmenting_layers,
        # One weight for both parts: readers take ten times this for the regression.
        "heads_coefficient": config.loss.soft_ce,
        "decay_coefficient": config.loss.decay,
    }
    llama = llama_fields(config, base.config)
    return {"architectures": ["LlamaForCausalLM"], **llama, "clover": clover}


def check_exportable(config: Clover2Config, base: BaseConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    layer, rope = config.layer, config.layer.rope
    refuse_draft_vocabulary(config, "official Clover-2")

    # The release builds Llama's layers, with one flag for all biases of the attention.
    if beyond := beyond_llama(layer):
        raise UserError(
            f"this head has {beyond}, as its base has, but the official Clover-2 layout holds "
            "heads of Llama's layers only"
        )
    _check_widths(layer)
    if rope != RopeConfig(theta=ROPE_THETA):
        raise UserError(
            f"this head rotates with base {rope.theta:g} (type {rope.kind}), but readers of the "
            f"official Clover-2 layout always use {ROPE_THETA:g} and would draft badly with it; "
            "train the head with --draft_rope_theta=10000 to export it"
        )
    if layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"the official Clover-2 layout has one attention_bias for all projections, but this "
            f"head has qkv_bias {layer.qkv_bias} and output_bias {layer.output_bias}"
        )

    if config.decoder_heads not in (0, layer.num_heads):
        raise UserError(
            f"readers of the official Clover-2 layout split Attention Decoders into num_heads "
            f"({layer.num_heads}) parts, but this head has decoder_heads ({config.decoder_heads})"
        )

    if config.unit_states:
        raise UserError(
            "this head scales the base's states to one size first (unit_states, for bases with "
            "norms after their layers, as Gemma); the official Clover-2 layout has no field for it"
        )

    # An ablated head has other parts, or the same ones in another order.
    if config.order != "decoder_first" or not config.output_projector:
        raise UserError(
            f"this head has order {config.order!r} and output_projector {config.output_projector}, "
            "but the official Clover-2 layout holds heads with 'decoder_first' and True only"
        )


def _check_widths(layer: LayerConfig) -> None:
    if layer.num_heads * layer.head_dim != layer.hidden_size:
        raise UserError(
            f"the official Clover-2 layout splits the width ({layer.hidden_size}) in num_heads "
            f"({layer.num_heads}) parts, which is not this head's head_dim ({layer.head_dim})"
        )


def clover2_leaves(config: Clover2Config) -> list[Leaf]:
    """Return the place of the official tensors in the params of `drafters.clover2.Clover2`."""
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
        over_states(("projector_1",), "clover_head_mlp2.weight", 2, width),  # state, then token
        whole(("projector_1_bias",), "clover_head_mlp2.bias", (width,)),
    ]


def _attention_decoder(config: LayerConfig, name: str, stored: str) -> list[Leaf]:
    """Map to query [D, N, H] and key_value [D, 2, N, H] with their biases."""
    # Keys and values are two stored matrices each, which fill one leaf.
    width, heads = config.hidden_size, (config.num_heads, config.head_dim)
    # Stored as [N H, D]: split into heads [N, H, D], then transposed to [D, N, H].
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


LAYOUT = Layout(
    name="clover2",
    kind="clover2",
    parse_config=parse_config,
    leaves=clover2_leaves,
    config_fields=config_fields,
    check_exportable=check_exportable,
    copies=dict.fromkeys(COPIES, "lm_head"),
    classes=("LlamaForCausalLM",),
    fields={"clover": {"num_heads", "num_layers", "heads_coefficient", "decay_coefficient"}},
)
