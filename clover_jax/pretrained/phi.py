"""Phi-3 and Phi-4: Llama with q, k and v in one stored matrix, and gate and up in another."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.pretrained.family import Family
from clover_jax.pretrained.llama_config import parse_llama_config, read_window
from clover_jax.pretrained.llama_tensors import packed_leaves

LONGROPE = ("su", "yarn")  # what the first versions call it
# Defaults of transformers' config, for absent fields.
PHI3_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
}


def parse_phi3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Phi-3 config into ours: no biases, and a window in every layer or none.

    The only scaling for long texts is longrope.
    """
    fixed = {"attention_bias": False, "mlp_bias": False, "model_type": "phi3"}
    values = PHI3_DEFAULTS | values | fixed
    # The field's older and newer name. "yarn" here means longrope, not YaRN.
    for name in ("rope_scaling", "rope_parameters"):
        fields = values.get(name)
        if isinstance(fields, dict) and fields.get("rope_type", fields.get("type")) in LONGROPE:
            values[name] = fields | {"rope_type": "longrope"}
    config = parse_llama_config(values, path)
    return dataclasses.replace(config, sliding_window=read_window(values, path))


PHI3 = Family(
    parse_phi3_config,
    functools.partial(packed_leaves, names={"qkv": "qkv_proj", "gate_up": "gate_up_proj"}),
)
