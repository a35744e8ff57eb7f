"""Baichuan: Llama with q, k and v in one stored matrix, and its own ways with positions and output.

The 7B models rotate; the 13B ones use ALiBi. Baichuan 2 divides each row of lm_head by its length
whenever it is used; here that is done once, as it is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.pretrained.family import Family
from clover_jax.pretrained.llama_config import parse_llama_config
from clover_jax.pretrained.llama_tensors import packed_leaves

DEFAULT_LENGTH = 4096
WIDTH_OF_13B = 5120
VOCABULARY_OF_2 = 125_696
_EPS = 1e-12  # torch's, in `normalize`


def parse_baichuan_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Baichuan config into ours; there are no biases and no grouped heads."""
    # The first versions call the context's length by another name.
    fixed = {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": None}
    length = {"max_position_embeddings": values.get("model_max_length", DEFAULT_LENGTH)}
    config = parse_llama_config(length | values | fixed, path)
    return dataclasses.replace(config, alibi=_has_alibi(values))


def adjust_baichuan(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Normalise lm_head where the checkpoint is one of Baichuan 2."""
    # The config has no version; these two fields are new in the second.
    is_second = values.get("vocab_size") == VOCABULARY_OF_2 or "z_loss_weight" in values
    if not is_second or name != "lm_head.weight":
        return tensor
    # In float32: a sum of thousands of bfloat16 squares is inexact.
    rows = tensor.astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _EPS)
    return rows


def _has_alibi(values: dict[str, Any]) -> bool:
    # One architecture name serves 7B and 13B, and only 7B's configs have a rotary length.
    if "BaiChuanForCausalLM" in (values.get("architectures") or []):
        return False
    return "max_position_embeddings" not in values or values["hidden_size"] == WIDTH_OF_13B


BAICHUAN = Family(
    parse_baichuan_config,
    functools.partial(packed_leaves, names={"qkv": "W_pack"}),
    adjust_baichuan,
)
