"""GLM-4 (dense, as GLM-4-0414) and GLM-4.5 to 4.7 (experts): a part of each head is rotated.

The dense models norm the outputs of attention and MLP too, and rotate neighboring numbers; rows of
their queries and keys are put in the order that we rotate, once, as they are read. The models with
experts choose them by sigmoids, and have one more that every token reads. Their layers that draft,
which follow the last one, are left out.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.expert_tensors import expert_leaves, with_experts
from clover_jax.checkpoints.llama_config import check_count, parse_llama_config, positive
from clover_jax.checkpoints.llama_tensors import Family, packed_leaves, renamed
from clover_jax.checkpoints.qwen_hybrids import shared_leaves
from clover_jax.checkpoints.tensor_map import Leaf, whole
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError

# Defaults of transformers' configs for absent fields.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "mlp_bias": False,
}
GLM4_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}
GLM4_MOE_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
}
# Their names of the norms around attention and MLP, for Gemma's.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def parse_glm4_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a dense GLM-4 config into ours."""
    config = _parse(GLM4_DEFAULTS | values, path)
    return dataclasses.replace(config, post_norms=True)


def _parse(values: dict[str, Any], path: Path) -> BaseConfig:
    config = parse_llama_config(values | {"model_type": "glm4", "mlp_bias": False}, path)
    # Queries, keys and values have biases.
    return dataclasses.replace(config, output_bias=False)


def glm4_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves with gate and up in one matrix, and other names of norms."""
    pattern = "|".join(_NORMS)
    leaves = packed_leaves(config, {"gate_up": "gate_up_proj"})
    return renamed(leaves, lambda name: re.sub(pattern, lambda found: _NORMS[found[0]], name))


def adjust_glm4(values: dict[str, Any], name: str, tensor: Any) -> Any:
    """Return queries and keys whose pairs lie half of the rotated part apart, not next to it."""
    letter = re.search(r"self_attn\.([qk])_proj", name)
    if letter is None:
        return tensor
    values = GLM4_DEFAULTS | values
    heads = values["num_attention_heads" if letter[1] == "q" else "num_key_value_heads"]
    rows = np.arange(tensor.shape[0]).reshape(heads, -1)
    share = (values.get("rope_parameters") or values).get("partial_rotary_factor", 0.5)
    rotated, kept = np.split(rows, [int(rows.shape[1] * share)], axis=1)
    order = np.concatenate([rotated[:, ::2], rotated[:, 1::2], kept], axis=1)
    return np.asarray(tensor)[order.reshape(-1)]


def parse_glm4_moe_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a GLM-4.5 config into ours: the first layers have one plain MLP."""
    values = GLM4_MOE_DEFAULTS | values
    # Experts in one group, behind some layers with a plain MLP.
    for name in ("moe_intermediate_size", "n_shared_experts", "n_group"):
        check_count(values, name, path)
    if values["n_group"] != 1:
        raise UserError(
            f"{path}: n_group {values['n_group']} is not supported, only 1: experts in groups are "
            "chosen by another rule"
        )
    dense = values["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise UserError(
            f"{path}: first_k_dense_replace must be a whole number, 0 or more, not {dense!r}"
        )

    # The shared experts are one of their common size.
    size = values["moe_intermediate_size"]
    config = dataclasses.replace(
        _parse(values, path), query_key_norm=bool(values.get("use_qk_norm", False))
    )
    return with_experts(
        config,
        values,
        path,
        "n_routed_experts",
        size,
        router="sigmoid",
        routed_scale=float(positive(values, "routed_scaling_factor", 1.0, path)),
        normed_weights=bool(values["norm_topk_prob"]),
        dense_layers=tuple(range(config.num_layers)[:dense]),
        shared_expert_size=size * values["n_shared_experts"],
        shared_gate=False,
    )


def glm4_moe_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves with experts, the bias that chooses them, and the shared one."""
    leaves = expert_leaves(config, "mlp", ("gate_proj", "up_proj", "down_proj"))
    for index in range(config.num_layers):
        if index not in config.dense_layers:
            path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.mlp"
            bias = f"{prefix}.gate.e_score_correction_bias"
            leaves.append(whole((*path, "choice_bias"), bias, (config.num_experts,)))
            leaves += shared_leaves(config, index, "shared_experts")
    return leaves


GLM4 = Family(parse_glm4_config, glm4_leaves, adjust_glm4)
GLM4_MOE = Family(parse_glm4_moe_config, glm4_moe_leaves, ignored=r"model\.layers\.<layers>\..*")
