"""Gemma 4: layers that see everything have fewer and wider heads than the layers with a window.

Those layers rotate a share of their pairs, and one matrix makes their keys and values. Queries,
keys and values are normed, scores are not scaled, a number multiplies what leaves a layer, and
norms are stored as they are, unlike Gemma 3's. Experts, if any, are next to the MLP. The last
layers of E2B and E4B read the keys and values of earlier ones, and every layer of theirs has an
embedding of each token. Of models for images and sound the text is read.

transformers before 5.15 writes the heads of those layers to `global_head_dim` and
`num_global_key_value_heads`, later versions to `per_layer_config`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.expert_tensors import stacked_leaves, with_experts
from clover_jax.checkpoints.llama_config import (
    FULL,
    SLIDING,
    check_count,
    parse_llama_config,
    parse_rope,
    positive,
    read_full_layers,
    read_window,
    refuse_share,
)
from clover_jax.checkpoints.llama_kin import beside_images
from clover_jax.checkpoints.llama_tensors import Family, base_leaves, norm_leaf
from clover_jax.checkpoints.tensor_map import Leaf, transposed, whole
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

# Defaults of transformers' configs for absent fields.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
# Of the 12B model, which reads images and sound without towers of their own.
UNIFIED_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": None,
}
ROTATIONS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
HEADS = ("num_key_value_heads", "head_dim")  # fields that layers may differ in


def parse_gemma4_config(
    values: dict[str, Any], path: Path, defaults: dict[str, Any] = DEFAULTS
) -> BaseConfig:
    """Turn the fields of a Gemma 4 text config into ours: every sixth layer sees everything."""
    values = defaults | values
    # Text is causal, whatever tokens of an image see.
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UserError(
            f"{path}: use_bidirectional_attention {values['use_bidirectional_attention']!r} is not "
            "supported: text is causal"
        )
    check_count(values, "num_hidden_layers", path)
    last = values["num_hidden_layers"] - 1
    full = {*read_full_layers(values, range(5, last, 6), path), last}  # as transformers reads it
    if values.get("layer_types") and values["layer_types"][last] == SLIDING:
        say(f"{path}: the last layer is read as {FULL}, as transformers does, not as {SLIDING}")
    (local_kv_heads, local_head_dim), heads = _read_heads(values, full, path)
    sharing, token_size = _read_sharing(values, full, path), 0
    if values["hidden_size_per_layer_input"]:
        check_count(values, "hidden_size_per_layer_input", path)
        token_size = values["hidden_size_per_layer_input"]
        if values["vocab_size_per_layer_input"] != values["vocab_size"]:
            raise UserError(
                f"{path}: vocab_size_per_layer_input ({values['vocab_size_per_layer_input']}) must "
                f"be vocab_size ({values['vocab_size']})"
            )

    # One rotation for each type of layer; transformers reads the older name first.
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if given and not given.keys() & ROTATIONS.keys():
        raise UserError(f"{path}: rope_parameters must name {' and '.join(ROTATIONS)}")
    rotations = ROTATIONS | {name: fields for name, fields in given.items() if fields}
    llama = {"rope_scaling": None, "rope_parameters": rotations[FULL], "mlp_bias": False}
    llama |= {"hidden_act": values["hidden_activation"]} | dict(zip(HEADS, heads, strict=True))
    config = parse_llama_config(values | llama, path)
    local_rope = parse_rope({"rope_parameters": rotations[SLIDING]}, path)
    refuse_share(local_rope, path)

    cap = "final_logit_softcapping"
    config = dataclasses.replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        score_scale=1.0,
        logit_cap=None if values.get(cap) is None else float(positive(values, cap, 0.0, path)),
        query_key_norm=True,
        value_norm=True,
        keys_as_values=bool(values.get("attention_k_eq_v")),
        post_norms=True,
        scaled_output=True,
        sliding_window=read_window(values, path),
        full_attention_layers=tuple(sorted(full)),
        local_rope=local_rope,
        local_kv_heads=local_kv_heads,
        local_head_dim=local_head_dim,
        num_sharing_layers=sharing,
        sharing_size=2 * config.intermediate_size if values.get("use_double_wide_mlp") else None,
        token_size=token_size,
    )
    try:
        for index in range(config.num_layers):
            config.layer_at(index)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if not values.get("enable_moe_block"):
        return config
    for name in ("top_k_experts", "moe_intermediate_size"):
        check_count(values, name, path)
    values["num_experts_per_tok"] = values["top_k_experts"]
    size = values["moe_intermediate_size"]
    return with_experts(config, values, path, "num_experts", size, parallel_mlp=True)


def _read_heads(
    values: dict[str, Any], full: set[int], path: Path
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (key heads, head_dim) of the layers with a window, and of those that see everything.

    Raises UserError for layers of one kind that differ.
    """
    wide = {"head_dim": values.get("global_head_dim")}
    if values.get("attention_k_eq_v"):
        wide["num_key_value_heads"] = values.get("num_global_key_value_heads")
    wide = {name: value for name, value in wide.items() if value is not None}
    changes = values.get("per_layer_config")
    if changes is None:
        changes = {str(index): wide for index in full}

    layers = range(values["num_hidden_layers"])
    are_objects = all(isinstance(fields, dict) for fields in changes.values())
    if not are_objects or not changes.keys() <= set(map(str, layers)):
        raise UserError(
            f'{path}: per_layer_config must have an object for each of some layers, "0" to '
            f'"{layers[-1]}"'
        )

    usual, found = {name: values[name] for name in HEADS}, []
    for is_full in (False, True):
        indices = [index for index in layers if (index in full) == is_full]
        kinds = [usual | changes.get(str(index), {}) for index in indices]
        if any(kind != kinds[0] or len(kind) > len(HEADS) for kind in kinds):
            raise UserError(
                f"{path}: per_layer_config may override {' and '.join(HEADS)} only, with the "
                "same values in all layers of a type"
            )
        found.append(kinds[0] if kinds else usual)
        for name in HEADS:
            check_count(found[-1], name, path)
    local, everywhere = ((kind[HEADS[0]], kind[HEADS[1]]) for kind in found)
    return local, everywhere


def _read_sharing(values: dict[str, Any], full: set[int], path: Path) -> int:
    """Return the number of last layers without keys; each needs one before them of its type."""
    count, sharing = values["num_hidden_layers"], values["num_kv_shared_layers"] or 0
    if type(sharing) is not int or not 0 <= sharing < count:
        raise UserError(f"{path}: num_kv_shared_layers must be 0 to {count - 1}, not {sharing!r}")
    with_keys = {index in full for index in range(count - sharing)}
    if {index in full for index in range(count)} != with_keys:
        raise UserError(
            f"{path}: num_kv_shared_layers ({sharing}) leaves a type of layer without keys"
        )
    return sharing


def gemma4_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves, with experts next to the MLP, whose gate and up are one tensor."""
    leaves = base_leaves(config)
    if config.token_size:
        leaves += _token_leaves(config)
    width, number = config.hidden_size, config.num_experts
    for index in range(config.num_layers if number else 0):
        path, prefix = (f"layers_{index}", "experts"), f"model.layers.{index}."

        # The experts' matrices, then their router and its scales.
        leaves += stacked_leaves(config, path, f"{prefix}experts")
        router = f"{prefix}router"
        leaves += [
            transposed((*path, "router"), f"{router}.proj.weight", (width, number)),
            whole((*path, "router_scale"), f"{router}.scale", (width,)),
            whole((*path, "expert_scale"), f"{router}.per_expert_scale", (number,)),
        ]

        # Experts and MLP have norms of their own; what both add together has the usual one.
        names = {"experts_norm": "pre_feedforward_layernorm_2"}
        names |= {"dense_post_norm": "post_feedforward_layernorm_1"}
        names |= {"experts_post_norm": "post_feedforward_layernorm_2"}
        leaves += [
            norm_leaf((path[0], ours), f"{prefix}{name}", width) for ours, name in names.items()
        ]
    return leaves


def _token_leaves(config: BaseConfig) -> list[Leaf]:
    """Return the leaves of the embeddings of tokens for each layer, and of what reads them."""
    width, size = config.hidden_size, config.token_size
    every = config.num_layers * size
    table, matrix = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"

    # One table has every layer's embedding of a token, one matrix every layer's projection.
    leaves = [
        whole(("token_embedding",), table, (config.vocab_size, every)),
        transposed(("token_projection",), matrix, (width, every)),
        norm_leaf(("token_norm",), "model.per_layer_projection_norm", size),
    ]

    for index in range(config.num_layers):
        path, prefix = f"layers_{index}", f"model.layers.{index}."
        gate, out = (f"{prefix}per_layer_{name}.weight" for name in ("input_gate", "projection"))
        leaves += [
            transposed((path, "token_gate"), gate, (width, size)),
            transposed((path, "token_out"), out, (size, width)),
            norm_leaf((path, "token_post_norm"), f"{prefix}post_per_layer_input_norm", width),
        ]
    return leaves


# Published layers that read the keys of others have unused matrices.
_UNUSED = r"model\..*layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
_OTHERS = r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\..*|"
_OTHERS += _UNUSED
GEMMA4 = Family(parse_gemma4_config, gemma4_leaves, ignored=_UNUSED)
# The 12B model, whose config has other defaults.
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4, parse=lambda values, path: parse_gemma4_config(values, path, UNIFIED_DEFAULTS)
)
GEMMA4_WHOLE = beside_images(GEMMA4, _OTHERS)
GEMMA4_UNIFIED_WHOLE = beside_images(GEMMA4_UNIFIED, _OTHERS)
