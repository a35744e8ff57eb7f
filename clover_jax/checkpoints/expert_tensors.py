"""Families with experts in the place of the MLP: Mixtral, Qwen3-MoE, gpt-oss.

Mixtral has Mistral's attention, Qwen3-MoE Qwen3's. gpt-oss has biases of experts, attention sinks,
and a window in every second layer. Its published experts are MXFP4: 32 numbers of four bits share a
power of two, and two of them one byte, the first in its lower half. All of them are numbers of
bfloat16 too, and are read as such.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from clover_jax.array_types import LeafPath
from clover_jax.checkpoints.llama_config import (
    check_count,
    parse_llama_config,
    read_full_layers,
    read_window,
)
from clover_jax.checkpoints.llama_kin import beside_images
from clover_jax.checkpoints.llama_tensors import Family, base_leaves
from clover_jax.checkpoints.tensor_map import Leaf, Piece, transposed, whole
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.models.layers import CLAMP, CLAMPED_GAIN

# The leaves of a layer's experts, in the order in which `expert_leaves` takes their names.
EXPERTS = ("expert_gate", "expert_up", "expert_down")
# Defaults of transformers' configs for absent fields.
MIXTRAL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_VL_MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
GPT_OSS_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_alpha": CLAMPED_GAIN,
    "swiglu_limit": CLAMP,
}
# The published models' rotation, for a config without one.
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
YARN_LENGTH = {"original_max_position_embeddings": 4096}


def parse_mixtral_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Mixtral config into ours: experts in every layer."""
    values = MIXTRAL_DEFAULTS | values | {"attention_bias": False, "mlp_bias": False}
    config = parse_llama_config(values, path)
    window = read_window(values, path)
    # An expert is as wide as the MLP that it replaces.
    size = config.intermediate_size
    return with_experts(config, values, path, "num_local_experts", size, sliding_window=window)


def parse_qwen3_moe_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3-MoE config into ours: some layers may have one plain MLP."""
    # Published configs and transformers' name the number of experts differently.
    name = "num_local_experts" if "num_local_experts" in values else "num_experts"
    values = QWEN3_MOE_DEFAULTS | {name: 128} | values | {"mlp_bias": False}
    for count in ("moe_intermediate_size", "decoder_sparse_step"):
        check_count(values, count, path)
    config = parse_llama_config(values, path)

    return with_experts(
        config,
        values,
        path,
        name,
        values["moe_intermediate_size"],
        query_key_norm=True,
        normed_weights=bool(values.get("norm_topk_prob", False)),
        dense_layers=dense_layers(values),
        sliding_window=read_window(values, path) if values.get("use_sliding_window") else None,
    )


def parse_qwen3_vl_moe_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of Qwen3-VL's text with experts into ours."""
    values = QWEN3_VL_MOE_DEFAULTS | {"norm_topk_prob": True} | values
    # transformers' router does not ask; others' do.
    if not values["norm_topk_prob"]:
        raise UserError(f"{path}: norm_topk_prob must be true, as transformers computes Qwen3-VL")
    return parse_qwen3_moe_config(values, path)


def dense_layers(values: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers with one MLP: those that are listed, and all but every `step`-th."""
    step, listed = values["decoder_sparse_step"], values.get("mlp_only_layers") or []
    layers = range(values["num_hidden_layers"])
    return tuple(index for index in layers if index in listed or (index + 1) % step)


def with_experts(
    config: BaseConfig, values: dict[str, Any], path: Path, name: str, size: int, **changes: Any
) -> BaseConfig:
    """Return a config with experts of width `size`, as many as the field `name` says."""
    for count in (name, "num_experts_per_tok"):
        check_count(values, count, path)
    # A router cannot choose an expert twice.
    number, chosen = values[name], values["num_experts_per_tok"]
    if chosen > number:
        raise UserError(f"{path}: num_experts_per_tok ({chosen}) is more than {name} ({number})")
    experts = {"num_experts": number, "experts_per_token": chosen, "expert_size": size}
    return dataclasses.replace(config, **experts, **changes)


def expert_leaves(
    config: BaseConfig,
    module: str,
    names: tuple[str, str, str],
    stacked: bool = False,
    inputs_first: bool = False,
) -> list[Leaf]:
    """Return the base's leaves, with experts in the place of MLPs.

    names: of an expert's gate, up and down, within the module.
    stacked, inputs_first: whether a layer's experts are stored in two tensors, not one by one, and
        how, as in `stacked_leaves`.
    """
    width, inner, number = config.hidden_size, config.expert_size, config.num_experts
    # [in, out] of an expert's gate, up and down, as in our leaves.
    shapes = ((width, inner), (width, inner), (inner, width))
    sparse = [i for i in range(config.num_layers) if i not in config.dense_layers]

    leaves = leaves_without_mlp(config, sparse)
    for index in sparse:
        path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.{module}"
        leaves.append(transposed((*path, "router"), f"{prefix}.gate.weight", (width, number)))
        if stacked:
            leaves += stacked_leaves(config, path, f"{prefix}.experts", inputs_first)
            continue
        for ours, name, shape in zip(EXPERTS, names, shapes, strict=True):
            # Each expert is a stored matrix [out, in] of its own; one leaf holds them all.
            stored = (shape[::-1], shape[::-1], (1, 0))
            pieces = tuple(
                Piece(f"{prefix}.experts.{e}.{name}.weight", *stored, (e,)) for e in range(number)
            )
            leaves.append(Leaf((*path, ours), (number, *shape), pieces))
    return leaves


def stacked_leaves(
    config: BaseConfig, path: LeafPath, prefix: str, inputs_first: bool = False
) -> list[Leaf]:
    """Return a layer's experts that are stored together: gates and ups in one tensor, and downs.

    inputs_first: whether each expert's matrices are stored [in, out], as ours are.
    """
    number, width, inner = config.num_experts, config.hidden_size, config.expert_size
    axes = (0, 1, 2) if inputs_first else (0, 2, 1)

    def stored(*shape: int) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in axes)

    leaves = []
    for side, ours in enumerate(EXPERTS[:2]):
        half = slice(side * inner, (side + 1) * inner)
        part = (slice(None),) * axes.index(2) + (half,)
        shape = (number, width, inner)
        sizes = stored(number, width, 2 * inner), stored(*shape)
        piece = Piece(f"{prefix}.gate_up_proj", *sizes, axes, part=part)
        leaves.append(Leaf((*path, ours), shape, (piece,)))
    shape = (number, inner, width)
    down = Piece(f"{prefix}.down_proj", stored(*shape), stored(*shape), axes)
    return [*leaves, Leaf((*path, EXPERTS[2]), shape, (down,))]


def leaves_without_mlp(config: BaseConfig, layers: Collection[int]) -> list[Leaf]:
    """Return Llama's leaves, less the plain MLPs of these layers, which give way to experts."""
    mlps = {(f"layers_{index}", "mlp") for index in layers}
    return [leaf for leaf in base_leaves(config) if leaf.path[:2] not in mlps]


def parse_gpt_oss_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a gpt-oss config into ours."""
    values = GPT_OSS_DEFAULTS | values | {"mlp_bias": False}
    if values.get("rope_scaling") is None and values.get("rope_parameters") is None:
        values["rope_parameters"] = YARN | YARN_LENGTH
    # The decoder's gate has these two numbers built in.
    if (values["swiglu_alpha"], values["swiglu_limit"]) != (CLAMPED_GAIN, CLAMP):
        raise UserError(
            f"{path}: swiglu_alpha {values['swiglu_alpha']} and swiglu_limit "
            f"{values['swiglu_limit']} are not supported, only {CLAMPED_GAIN} and {CLAMP}"
        )

    config = parse_llama_config(values, path)
    # Without layer_types the layers 1, 3, .. see everything.
    every_second = range(1, config.num_layers, 2)
    return with_experts(
        config,
        values,
        path,
        "num_local_experts",
        config.intermediate_size,
        sinks=True,
        expert_bias=True,
        activation="clamped",
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, every_second, path),
    )


def gpt_oss_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves, with experts that are stored together, gate and up alternating."""
    number, width, inner = config.num_experts, config.hidden_size, config.expert_size
    leaves = leaves_without_mlp(config, range(config.num_layers))
    for index in range(config.num_layers):
        path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.mlp"
        # The stored router is [out, in], like Llama's matrices; experts are [X, in, out], as ours.
        leaves += [
            transposed((*path, "router"), f"{prefix}.router.weight", (width, number)),
            whole((*path, "router_bias"), f"{prefix}.router.bias", (number,)),
            whole((*path, "expert_down"), f"{prefix}.experts.down_proj", (number, inner, width)),
            whole((*path, "expert_down_bias"), f"{prefix}.experts.down_proj_bias", (number, width)),
        ]

        # One matrix has both, and so has its bias.
        for kind, shape in (("", (number, width, inner)), ("_bias", (number, inner))):
            both = f"{prefix}.experts.gate_up_proj{kind}"
            leaves.append(_every_second((*path, f"expert_gate{kind}"), both, shape, 0))
            leaves.append(_every_second((*path, f"expert_up{kind}"), both, shape, 1))
    return leaves


def _every_second(path: tuple[str, ...], name: str, shape: tuple[int, ...], first: int) -> Leaf:
    """Return the leaf that is every second column of a stored tensor, from `first` on."""
    stored, part = (*shape[:-1], 2 * shape[-1]), (..., slice(first, None, 2))
    return Leaf(path, shape, (Piece(name, stored, shape, tuple(range(len(shape))), part=part),))


# In Mixtral's names w1 is gate, w3 is up and w2 is down.
MIXTRAL = Family(
    parse_mixtral_config,
    functools.partial(expert_leaves, module="block_sparse_moe", names=("w1", "w3", "w2")),
)
_qwen3_leaves = functools.partial(
    expert_leaves, module="mlp", names=("gate_proj", "up_proj", "down_proj")
)
QWEN3_MOE = Family(parse_qwen3_moe_config, _qwen3_leaves)
QWEN3_VL_MOE = beside_images(
    Family(
        parse_qwen3_vl_moe_config,
        functools.partial(_qwen3_leaves, stacked=True, inputs_first=True),  # as published
        alternative=functools.partial(_qwen3_leaves, stacked=True),  # as transformers 5 saves
    ),
    r"model\.visual\..*",
)
GPT_OSS = Family(parse_gpt_oss_config, gpt_oss_leaves)
