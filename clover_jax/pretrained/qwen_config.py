"""The config.json of Qwen2 and Qwen2.5 (biases of q, k, v) and of Qwen3 (norms of q and k)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.models.sliding_window import read_full_layers, read_window
from clover_jax.pretrained.llama_config import parse_llama_config

# What transformers' configs mean where a field is absent.
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def parse_qwen2_config(
    values: dict[str, Any], path: Path, generation: dict[str, Any] | None = None
) -> BaseConfig:
    """Turn the fields of a Qwen2 config into ours: the biases are there without being named."""
    values = DEFAULTS | values | {"attention_bias": False, "mlp_bias": False}
    config = _with_window(parse_llama_config(values, path, generation), values, path)
    return dataclasses.replace(config, qkv_bias=True)


def parse_qwen3_config(
    values: dict[str, Any], path: Path, generation: dict[str, Any] | None = None
) -> BaseConfig:
    """Turn the fields of a Qwen3 config into ours."""
    values = DEFAULTS | {"head_dim": 128} | values | {"mlp_bias": False}
    config = _with_window(parse_llama_config(values, path, generation), values, path)
    return dataclasses.replace(config, query_key_norm=True)


def _with_window(config: BaseConfig, values: dict[str, Any], path: Path) -> BaseConfig:
    """Add the window, which these configs give even where it is not used."""
    if not values.get("use_sliding_window"):
        return config
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, values["max_window_layers"], path),
    )
