"""Mistral's config.json: Llama's without biases, every layer over a sliding window."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.models.sliding_window import read_full_layers, read_window
from clover_jax.pretrained.llama_config import parse_llama_config

# What transformers' MistralConfig means where a field is absent.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def parse_mistral_config(
    values: dict[str, Any], path: Path, generation: dict[str, Any] | None = None
) -> BaseConfig:
    """Turn the fields of a Mistral config into ours."""
    values = DEFAULTS | values | {"attention_bias": False, "mlp_bias": False}
    config = parse_llama_config(values, path, generation)
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, 0, path),
    )
