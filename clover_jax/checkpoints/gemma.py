"""Gemma 2 and the text of Gemma 3: their config.json, and norms that are stored as w for 1 + w.

Both norm the outputs of attention and MLP, scale embeddings by the square root of the width, gate
with GELU, and alternate layers with and without a window. Gemma 2 caps scores and logits softly;
Gemma 3 norms queries and keys, and rotates layers with a window with another base.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.llama_config import (
    FULL,
    SLIDING,
    parse_llama_config,
    parse_rope,
    positive,
    read_full_layers,
    read_window,
)
from clover_jax.checkpoints.llama_tensors import Family, base_leaves
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError

# Defaults of transformers' configs for absent fields; published ones of Gemma 3 leave out many.
GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# Gemma 3 has no caps: its queries and keys are normed instead.
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
# Default rotary bases of Gemma 3: for layers without a window, and for those with one.
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def parse_gemma2_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Gemma 2 config into ours: every second layer sees everything."""
    return _parse(GEMMA2_DEFAULTS | values, path, every=2)


def parse_gemma3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Gemma 3 text config into ours: every sixth layer sees everything."""
    values = GEMMA3_DEFAULTS | values
    # The newer object has a rotation for each type of layer, the older fields one for both.
    newer = values.get("rope_parameters") or {}
    rotation = newer.get(FULL) or {}
    local = {"rope_theta": values.get("rope_local_base_freq") or LOCAL_THETA}
    values |= {
        "rope_theta": values.get("rope_theta") or GLOBAL_THETA,
        "rope_parameters": rotation,
    }

    # The period of the layers without a window; newer configs list the types instead.
    every = values.get("sliding_window_pattern") or 6
    config = _parse(values, path, every)
    # Scaling for long texts concerns the layers that see them.
    local_rope = parse_rope(local | {"rope_parameters": newer.get(SLIDING)}, path)
    return dataclasses.replace(config, query_key_norm=True, local_rope=local_rope)


def parse_multimodal_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the config of a Gemma 3 that also reads images into that of its text."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{path}: text_config must be an object, not {text!r}")
    # Special tokens may be named outside, for both parts.
    outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
    shared = {name: values[name] for name in outer if values.get(name) is not None}
    # Fields of text_config win over the shared ones.
    return parse_gemma3_config(shared | text, path)


def _parse(values: dict[str, Any], path: Path, every: int) -> BaseConfig:
    if values.get("use_bidirectional_attention"):
        raise UserError(f"{path}: use_bidirectional_attention is not supported: text is causal")
    # Gemma names the activation's field differently, and its MLP never has biases.
    llama = values | {"hidden_act": values["hidden_activation"], "mlp_bias": False}
    config = parse_llama_config(llama, path)

    def cap(name: str) -> float | None:
        return None if values[name] is None else float(positive(values, name, 0.0, path))

    # Published configs state the period of the layers that see everything, or list the types.
    full = range(every - 1, config.num_layers, every)
    return dataclasses.replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        score_scale=positive(values, "query_pre_attn_scalar", 256, path) ** -0.5,
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
        post_norms=True,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, full, path),
    )


def adjust_gemma(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a norm's scale 1 + w in float32, which bfloat16 rounds when it is placed."""
    # All norms' names end like this, including the norms of queries and keys.
    return tensor.astype(np.float32) + 1 if name.endswith("norm.weight") else tensor


GEMMA2 = Family(parse_gemma2_config, adjust=adjust_gemma)
GEMMA3 = Family(parse_gemma3_config, adjust=adjust_gemma)
GEMMA3_MULTIMODAL = Family(
    parse_multimodal_config,
    functools.partial(base_leaves, prefix="language_model."),
    adjust_gemma,
    # The parts for images, and a second copy of the tied embedding.
    r"(vision_tower|multi_modal_projector)\..*|language_model\.lm_head\.weight",
)
