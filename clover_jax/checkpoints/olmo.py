"""OLMo 2 and OLMo 3: norms after attention and MLP only, and one over all heads' queries or keys.

Three of four layers of OLMo 3 have a sliding window; rotary scaling concerns the others.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.llama_config import (
    FULL,
    SLIDING,
    parse_llama_config,
    parse_rope,
    read_full_layers,
    read_window,
)
from clover_jax.checkpoints.llama_tensors import Family
from clover_jax.config import BaseConfig

# Defaults of transformers' configs for absent fields.
OLMO2_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279, "mlp_bias": False}
OLMO3_DEFAULTS = OLMO2_DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096}


def parse_olmo2_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of an OLMo 2 config into ours."""
    config = parse_llama_config(OLMO2_DEFAULTS | values | {"mlp_bias": False}, path)
    return dataclasses.replace(config, pre_norms=False, post_norms=True, joint_head_norm=True)


def parse_olmo3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of an OLMo 3 config into ours: every fourth layer sees everything."""
    values = OLMO3_DEFAULTS | values
    # The newer object has a rotation for each type of layer, the older fields scale one of them.
    newer = values.get("rope_parameters") or {}
    rotation = newer.get(FULL, {} if SLIDING in newer else newer)
    theta = {"rope_theta": values["rope_theta"]}
    config = parse_olmo2_config(values | {"rope_parameters": rotation}, path)
    full = range(3, config.num_layers, 4)
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, full, path),
        local_rope=parse_rope(theta | {"rope_parameters": newer.get(SLIDING)}, path),
    )


OLMO2 = Family(parse_olmo2_config)
OLMO3 = Family(parse_olmo3_config)
