"""Phi-3 and Phi-4: Llama with q, k and v in one stored matrix, and gate and up in another."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.pretrained.family import Family
from clover_jax.pretrained.llama_config import parse_llama_config, read_window
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_map import Leaf

LONGROPE = ("su", "yarn")  # what the first versions call it
PHI3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
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
    for name in ("rope_scaling", "rope_parameters"):
        fields = values.get(name)
        if isinstance(fields, dict) and fields.get("rope_type", fields.get("type")) in LONGROPE:
            values[name] = fields | {"rope_type": "longrope"}
    config = parse_llama_config(values, path)
    return dataclasses.replace(config, sliding_window=read_window(values, path))


def phi3_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves with the fused ones read from `qkv_proj` and `gate_up_proj`."""
    names = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
    leaves = base_leaves(config)
    return [
        _from_one(leaf, names[leaf.path[-1]]) if leaf.path[-1] in names else leaf for leaf in leaves
    ]


def _from_one(leaf: Leaf, name: str) -> Leaf:
    """Return a leaf whose stored tensors lie below each other in one, in the leaf's own order."""
    ends = list(itertools.accumulate(piece.shape[0] for piece in leaf.pieces))
    stored = re.sub(r"\w+_proj", name, leaf.pieces[0].name)
    pieces = (
        dataclasses.replace(
            piece,
            name=stored,
            shape=(ends[-1], piece.shape[1]),
            part=(slice(end - piece.shape[0], end),),
        )
        for piece, end in zip(leaf.pieces, ends, strict=True)
    )
    return dataclasses.replace(leaf, pieces=tuple(pieces))


PHI3 = Family(parse_phi3_config, phi3_leaves)
