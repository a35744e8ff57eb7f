"""The config.json of the official Clover-2 layout: a Llama config with a "clover" object."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig, LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.errors import UserError
from clover_jax.pretrained.llama_config import MOST_LAYERS, check_count, parse_llama_config
from clover_jax.storage.json_files import read_json_object

ROPE_THETA = 10_000.0  # what readers of the layout use, whatever rope_theta says


def read_config(path: Path, rope_theta: float = ROPE_THETA) -> Clover2Config:
    """Read the head's config.

    Raises UserError for what is missing or cannot be.
    """
    values = read_json_object(path)
    clover = values.get("clover")
    if not isinstance(clover, dict):
        raise UserError(f'{path} has no "clover" object; it is not an official Clover-2 head')
    for name in ("num_heads", "num_layers"):
        check_count({f"clover.{name}": clover.get(name)}, f"clover.{name}", path, MOST_LAYERS)
    llama = parse_llama_config(values, path)
    _check_widths(llama.layer)
    scale = _number(clover, "heads_coefficient", 1.0, path)
    decay = _number(clover, "decay_coefficient", 0.7, path)
    loss = LossSpec(regression=10.0 * scale, soft_ce=scale, decay=decay)
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


def _number(clover: dict[str, Any], name: str, default: float, path: Path) -> float:
    value = clover.get(name, default)
    if not isinstance(value, int | float):
        raise UserError(f"{path}: clover.{name} must be a number, not {value!r}")
    return value


def config_fields(config: Clover2Config, base: BaseConfig) -> dict[str, Any]:
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
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": list(base.eos_token_ids) or None,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "clover": {
            "num_heads": config.num_positions,
            "num_layers": config.num_augmenting_layers,
            "heads_coefficient": config.loss.soft_ce,
            "decay_coefficient": config.loss.decay,
        },
    }


def check_exportable(config: Clover2Config) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    layer, rope = config.layer, config.layer.rope
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {config.draft_vocab_size} of the base's {config.vocab_size} "
            "tokens, and the official Clover-2 layout has no draft vocabulary; train one without "
            "--draft_vocab to export it"
        )
    for name, foreign in {
        "ALiBi": layer.alibi,
        "query and key norms": layer.query_key_norm,
    }.items():
        if foreign:
            raise UserError(
                f"this head has {name}, as its base has, but the official Clover-2 layout holds "
                "heads of Llama's layers only"
            )
    _check_widths(layer)
    if rope != RopeConfig(theta=ROPE_THETA):
        raise UserError(
            f"this head rotates with base {rope.theta:g} (type {rope.kind}), but readers of the "
            f"official Clover-2 layout always use {ROPE_THETA:g} and would draft badly with it; "
            "train the head with --draft_rope_theta=10000 to export it"
        )
    if config.order != "decoder_first" or not config.output_projector:
        raise UserError(
            f"this head has order {config.order!r} and output_projector {config.output_projector}, "
            "but the official Clover-2 layout holds heads with 'decoder_first' and True only"
        )
    if layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"the official Clover-2 layout has one attention_bias for all projections, but this "
            f"head has qkv_bias {layer.qkv_bias} and output_bias {layer.output_bias}"
        )


def _check_widths(layer: LayerConfig) -> None:
    if layer.num_heads * layer.head_dim != layer.hidden_size:
        raise UserError(
            f"the official Clover-2 layout splits the width ({layer.hidden_size}) in num_heads "
            f"({layer.num_heads}) parts, which is not this head's head_dim ({layer.head_dim})"
        )
