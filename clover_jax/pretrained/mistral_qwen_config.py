"""The config.json of Mistral, Qwen2, Qwen2.5 and Qwen3: Llama's with a few differences.

Mistral has no biases, and every layer looks back over a sliding window. Qwen2 and 2.5 have biases
of q, k and v, Qwen3 norms of q and k; either may have a window in some of its layers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.llama_config import parse_llama_config, read_full_layers, read_window

# What transformers' configs mean where a field is absent.
MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# In none of these do the fields turn biases on.
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}


def parse_mistral_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Mistral config into ours."""
    values = MISTRAL_DEFAULTS | values | _NO_BIASES
    # 0: no layer goes without the window.
    return _with_window(parse_llama_config(values, path), values, 0, path)


def parse_qwen2_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen2 config into ours: the biases are there without being named."""
    config = _parse_qwen(QWEN_DEFAULTS | values | _NO_BIASES, path)
    return dataclasses.replace(config, qkv_bias=True)


def parse_qwen3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3 config into ours."""
    values = QWEN_DEFAULTS | {"head_dim": 128} | values | {"mlp_bias": False}
    return dataclasses.replace(_parse_qwen(values, path), query_key_norm=True)


def _parse_qwen(values: dict[str, Any], path: Path) -> BaseConfig:
    config = parse_llama_config(values, path)
    # These configs give a window even where it is not used.
    if not values.get("use_sliding_window"):
        return config
    # Newer configs list the kind of each layer, and need no count.
    num_full = values["max_window_layers"]
    is_count = isinstance(num_full, int) and num_full >= 0
    if values.get("layer_types") is None and not is_count:
        raise UserError(
            f"{path}: max_window_layers must be a whole number, 0 or more, not {num_full!r}"
        )
    return _with_window(config, values, num_full if is_count else 0, path)


def _with_window(
    config: BaseConfig, values: dict[str, Any], num_full: int, path: Path
) -> BaseConfig:
    # Qwen's first `num_full` layers have no window; Mistral has 0 of them.
    first = range(config.num_layers)[:num_full]
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, first, path),
    )
