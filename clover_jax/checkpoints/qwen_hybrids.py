"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE: gated delta nets, and gated attention in every fourth layer.

Attention norms queries and keys, rotates a part of each head, and multiplies its output by a gate
that is stored next to the queries. All norms are stored as w for 1 + w, but for the one within a
delta net. Experts come with one more that every token reads. Of Qwen3.5's models for images the
text is read: for text-only input M-RoPE reduces to RoPE. Their own layer that drafts is read only
when it is asked for (`mtp.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.expert_tensors import dense_layers, expert_leaves, with_experts
from clover_jax.checkpoints.llama_config import (
    FULL,
    check_count,
    parse_llama_config,
    read_full_layers,
)
from clover_jax.checkpoints.llama_kin import adjust_gemma, beside_images
from clover_jax.checkpoints.llama_tensors import Family, base_leaves
from clover_jax.checkpoints.tensor_map import Leaf, Piece, transposed, whole
from clover_jax.config import BaseConfig, DeltaConfig
from clover_jax.errors import UserError

LINEAR = "linear_attention"  # in `layer_types`
# Defaults of transformers' configs for absent fields.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mlp_bias": False,
}
NEXT_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
DENSE_DEFAULTS = DEFAULTS | {"num_key_value_heads": 4}
MOE_DEFAULTS = NEXT_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8}


def parse_qwen3_next_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3-Next config into ours: some layers may have one plain MLP."""
    values = NEXT_DEFAULTS | values
    # A config without plain MLPs need not have their width.
    values.setdefault("intermediate_size", values["moe_intermediate_size"])
    counts = "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"
    for name in counts:
        check_count(values, name, path)
    return with_experts(
        _parse_hybrid(values, path),
        values,
        path,
        "num_experts",
        values["moe_intermediate_size"],
        normed_weights=bool(values["norm_topk_prob"]),
        dense_layers=dense_layers(values),
        shared_expert_size=values["shared_expert_intermediate_size"],
    )


def parse_qwen3_5_moe_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3.5-MoE's text config into ours: experts in every layer."""
    # These configs have no fields for plain MLPs and for weights that are not normed.
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return parse_qwen3_next_config(MOE_DEFAULTS | values | fixed, path)


def _parse_hybrid(values: dict[str, Any], path: Path) -> BaseConfig:
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    names = [f"linear_{name}" for name in (*sizes, "conv_kernel_dim")]
    for name in (*names, "full_attention_interval"):
        check_count(values, name, path)
    every, count = values["full_attention_interval"], values.get("num_hidden_layers")
    config = parse_llama_config(values | {"model_type": "qwen3_next"}, path)
    if config.activation != "silu":
        raise UserError(f"{path}: hidden_act {values['hidden_act']!r} is not supported, only silu")
    try:
        delta = DeltaConfig(*(values[name] for name in names))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error

    full = range(every - 1, config.num_layers, every)
    full_layers = read_full_layers(values, full, path, (LINEAR, FULL))
    # Heads are decoder layers of attention, and begin as a base's: one must be there.
    if not full_layers or len(full_layers) == count:
        raise UserError(
            f"{path}: {len(full_layers)} of {count} layers have attention; a base of this family "
            "needs layers of both kinds"
        )
    return dataclasses.replace(
        config,
        query_key_norm=True,
        output_gate=True,
        delta=delta,
        full_attention_layers=full_layers,
    )


def hybrid_leaves(config: BaseConfig, fused: bool = False, stacked: bool = False) -> list[Leaf]:
    """Return Llama's leaves with delta nets, experts, and the expert that tokens share.

    fused: whether a delta net's input matrices are stored in two, one key head after another, as in
        Qwen3-Next, or in four.
    stacked: as for `expert_leaves`.
    """
    names, leaves = ("gate_proj", "up_proj", "down_proj"), base_leaves(config)
    if config.num_experts:
        leaves = expert_leaves(config, "mlp", names, stacked)
    linear = [i for i in range(config.num_layers) if config.layer_at(i).delta]
    nets = {(f"layers_{index}", "attention") for index in linear}
    leaves = [leaf for leaf in leaves if leaf.path[:2] not in nets]
    for index in linear:
        leaves += _delta_leaves(config, index, fused)
    for index in range(config.num_layers):
        if config.layer_at(index).num_experts:
            leaves += shared_leaves(config, index, "shared_expert")
    return leaves


def _delta_leaves(config: BaseConfig, index: int, fused: bool) -> list[Leaf]:
    """Return the leaves of one delta net."""
    net, width = config.delta, config.hidden_size
    assert net is not None  # of a base with delta nets
    path, prefix = (f"layers_{index}", "attention"), f"model.layers.{index}.linear_attn."
    heads, groups, channels = net.num_key_heads, net.num_groups, net.channels
    inner, all_keys = groups * net.value_size, heads * net.key_size
    all_values, every = heads * inner, slice(None)

    # Parts of the channels of one key head, and the rows of stored matrices that hold them.
    sizes = (net.key_size, net.key_size, inner)
    ends = (0, all_keys, 2 * all_keys, 2 * all_keys + all_values)
    rows = [slice(*pair) for pair in itertools.pairwise(ends)]
    stored, start = heads * channels, 0
    conv, matrices = [], []
    for size, part in zip(sizes, rows, strict=True):
        where = (every, every, slice(start, start + size))
        at: dict[str, Any] = {"axes": (2, 0, 1), "index": where, "part": (part,)}
        taps = (heads, size, net.conv_size)
        conv.append(Piece(f"{prefix}conv1d.weight", (stored, 1, net.conv_size), taps, **at))
        split = (heads, size, width)
        matrices.append(Piece(f"{prefix}in_proj_qkv.weight", (stored, width), split, **at))
        start += size

    def by_head(name: str, size: int, begin: int = 0) -> Piece:
        where = (every, every, slice(begin, begin + size))
        return Piece(name, (heads * size, width), (heads, size, width), (2, 0, 1), where)

    if fused:
        matrices = [by_head(f"{prefix}in_proj_qkvz.weight", channels + inner)]
        gates = [by_head(f"{prefix}in_proj_ba.weight", 2 * groups)]
    else:
        matrices.append(by_head(f"{prefix}in_proj_z.weight", inner, channels))
        gates = [
            by_head(f"{prefix}in_proj_{name}.weight", groups, i * groups)
            for i, name in enumerate("ba")
        ]
    per_head = (heads, groups)
    out = Piece(
        f"{prefix}out_proj.weight",
        (width, all_values),
        (width, *per_head, net.value_size),
        (1, 2, 3, 0),
    )
    rates = {"delta_rate": "A_log", "delta_rate_bias": "dt_bias"}
    return [
        Leaf((*path, "delta_in"), (width, heads, channels + inner), tuple(matrices)),
        Leaf((*path, "delta_gates"), (width, heads, 2 * groups), tuple(gates)),
        Leaf((*path, "delta_conv"), (net.conv_size, heads, channels), tuple(conv)),
        *(
            Leaf(
                (*path, ours),
                per_head,
                (Piece(prefix + name, (heads * groups,), per_head, (0, 1)),),
            )
            for ours, name in rates.items()
        ),
        whole((*path, "norm", "scale"), f"{prefix}norm.weight", (net.value_size,)),
        Leaf((*path, "out"), (*per_head, net.value_size, width), (out,)),
    ]


def shared_leaves(config: BaseConfig, index: int, name: str) -> list[Leaf]:
    """Return the leaves of the expert that all tokens read, and of its gate, if it has one."""
    path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.mlp.{name}"
    width, inner = config.hidden_size, config.shared_expert_size
    shape = (inner, width)
    gate_up = tuple(
        Piece(f"{prefix}.{name}_proj.weight", shape, shape, (1, 0), (slice(None), side))
        for side, name in enumerate(("gate", "up"))
    )
    leaves = [
        Leaf((*path, "shared", "gate_up"), (width, 2, inner), gate_up),
        transposed((*path, "shared", "down"), f"{prefix}.down_proj.weight", (inner, width)),
    ]
    if config.shared_gate:
        leaves.append(transposed((*path, "shared_gate"), f"{prefix}_gate.weight", (width, 1)))
    return leaves


def adjust_hybrid(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a norm's scale 1 + w, as Gemma's are, but not that of a delta net."""
    return tensor if "linear_attn." in name else adjust_gemma(values, name, tensor)


# The heads that draft are stored with the base.
_DRAFTS = r"mtp\..*"
_IGNORED = rf"{_DRAFTS}|model\.visual\..*|lm_head\.weight"


QWEN3_NEXT = Family(
    parse_qwen3_next_config, functools.partial(hybrid_leaves, fused=True), adjust_hybrid, _DRAFTS
)
QWEN3_5 = Family(
    lambda values, path: _parse_hybrid(DENSE_DEFAULTS | values, path),
    hybrid_leaves,
    adjust_hybrid,
    _DRAFTS,
)
QWEN3_5_IMAGES = beside_images(QWEN3_5, _IGNORED)
# Published experts of a layer are stored together, those that transformers saves one by one.
QWEN3_5_MOE = Family(
    parse_qwen3_5_moe_config,
    hybrid_leaves,
    adjust_hybrid,
    _DRAFTS,
    alternative=functools.partial(hybrid_leaves, stacked=True),
)
QWEN3_5_MOE_IMAGES = beside_images(QWEN3_5_MOE, _IGNORED)
