"""The fields of config.json that several layouts share: a Llama config of one layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig, RopeConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.llama_config import ORIGINAL, parse_llama_config


def read_eagle_layer(values: dict[str, Any], path: Path) -> LayerConfig:
    """Return an EAGLE head's layer.

    Raises UserError for missing or impossible fields.
    """
    llama = parse_llama_config(values, path)
    layers = values["num_hidden_layers"]
    if layers != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1")
    # A field of our own: Llama's attention_bias is for all four projections.
    qkv_bias = bool(values.get("qkv_bias", llama.qkv_bias))
    return dataclasses.replace(llama.layer, qkv_bias=qkv_bias)


def llama_fields(config: DrafterConfig, base: BaseConfig) -> dict[str, Any]:
    """Return the fields of config.json for the layer of a head."""
    layer = config.layer
    # The ids of special tokens and the context are the base's: the head has the same text.
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": _rope_scaling(layer.rope),
        # Every other activation was refused by `beyond_llama`.
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": list(base.eos_token_ids) or None,
        # Llama has one field for q, k, v and o; layouts where these may differ add or check more.
        "attention_bias": layer.output_bias,
        "mlp_bias": layer.mlp_bias,
    }


def eagle_fields(config: DrafterConfig, base: BaseConfig, architecture: str) -> dict[str, Any]:
    """Return `llama_fields` with those that the EAGLE layouts have besides."""
    layer = config.layer
    more = {"head_dim": layer.head_dim, "qkv_bias": layer.qkv_bias}
    return {"architectures": [architecture], **llama_fields(config, base), **more}


# The fields of each type beside its factor. Longrope is refused before (`beyond_llama`).
_OF_ROPE = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", ORIGINAL),
}


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    own = {name: getattr(rope, name) for name in _OF_ROPE[rope.kind]}
    return {"rope_type": rope.kind, "factor": rope.factor} | own


# Fields of a layer that no Llama config has, so that a reader would leave them out without a word.
_BEYOND_LLAMA = {
    "alibi": "ALiBi",
    "query_key_norm": "query and key norms",
    "score_scale": "its own scale of scores",
    "score_cap": "soft-capped scores",
    "post_norms": "norms after attention and MLP",
    "sinks": "attention sinks",
    "activation": "an activation of its own",
}


def beyond_llama(layer: LayerConfig) -> str | None:
    """Return in words what a layer has beyond Llama's; None for a Llama layer."""
    # `as_llama` keeps the rotation, so the comparison below would not see a difference in it.
    if layer.rope.kind == "longrope" or layer.rope.share != 1:
        return "a rotation of Phi's kind"
    llama = layer.as_llama()
    names = (name for name in _BEYOND_LLAMA if getattr(layer, name) != getattr(llama, name))
    return next((_BEYOND_LLAMA[name] for name in names), None)


def check_llama_layer(layer: LayerConfig) -> None:
    """Raise UserError for a layer that readers of the EAGLE layouts would run differently."""
    if beyond := beyond_llama(layer):
        # A Llama layer keeps the rotation of its base.
        advice = "; train with --drafter_options=llama_layer=true to export it"
        raise UserError(
            f"this head has {beyond}, as its base has, but the EAGLE layouts hold heads of Llama's "
            f"layers only{'' if beyond_llama(layer.as_llama()) else advice}"
        )
