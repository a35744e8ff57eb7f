"""Where the tensors of a Hugging Face Llama checkpoint lie in our params.

The rotary form needs no permutation: Hugging Face stores the half-split one, as we use it.
"""

from __future__ import annotations

import numpy as np

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig, LayerConfig
from clover_jax.pretrained.tensor_map import Leaf, Path, Piece, take_apart, transposed, whole


def base_leaves(config: BaseConfig) -> list[Leaf]:
    """Return all leaves of the base, in the order of the forward pass."""
    matrix = (config.vocab_size, config.hidden_size)
    leaves = [whole(("embedding",), "model.embed_tokens.weight", matrix)]
    for index in range(config.num_layers):
        leaves += layer_leaves(config.layer, (f"layers_{index}",), f"model.layers.{index}.")
    leaves.append(norm_leaf(("final_norm",), "model.norm", config.hidden_size))
    if not config.tie_word_embeddings:
        leaves.append(whole(("lm_head",), "lm_head.weight", matrix))
    return leaves


def export_base(params: Params, config: BaseConfig) -> dict[str, np.ndarray]:
    """Return the tensors of the base under their Hugging Face names, for a safetensors file."""
    return take_apart(base_leaves(config), params)


def layer_leaves(
    config: LayerConfig,
    path: Path,
    prefix: str,
    input_norm: bool = True,
    read_width: int | None = None,
) -> list[Leaf]:
    """Return the leaves of one decoder layer.

    path: where the layer hangs in our tree.
    prefix: what its stored names start with, such as "model.layers.0.".
    input_norm: False for the layer that has no norm before its attention.
    read_width: columns that its attention reads; None is the hidden size.
    """
    attention, mlp = (*path, "attention"), (*path, "mlp")
    norm = norm_leaf((*path, "attention_norm"), f"{prefix}input_layernorm", config.hidden_size)
    leaves = [
        *([norm] if input_norm else []),
        _qkv(config, attention, f"{prefix}self_attn.", read_width or config.hidden_size),
        _attention_out(config, attention, f"{prefix}self_attn.o_proj"),
        norm_leaf((*path, "mlp_norm"), f"{prefix}post_attention_layernorm", config.hidden_size),
        _gate_up(config, mlp, f"{prefix}mlp."),
        transposed(
            (*mlp, "down"),
            f"{prefix}mlp.down_proj.weight",
            (config.intermediate_size, config.hidden_size),
        ),
    ]
    leaves += _head_norms(config, attention, prefix)
    return leaves + _layer_biases(config, attention, mlp, prefix)


def norm_leaf(path: Path, name: str, width: int) -> Leaf:
    """Return the scale of an RMSNorm."""
    return whole((*path, "scale"), f"{name}.weight", (width,))


def _qkv(config: LayerConfig, path: Path, prefix: str, width: int) -> Leaf:
    """Map to qkv [D, K, G + 2, H]: for each key/value head its G queries, its key, its value."""
    heads, size = config.num_kv_heads, config.head_dim
    groups = config.num_groups
    every = slice(None)
    pieces = [
        Piece(
            f"{prefix}q_proj.weight",
            (config.num_heads * size, width),
            (heads, groups, size, width),
            (3, 0, 1, 2),
            (every, every, slice(0, groups)),
        )
    ]
    pieces += [
        Piece(
            f"{prefix}{letter}_proj.weight",
            (heads * size, width),
            (heads, size, width),
            (2, 0, 1),
            (every, every, slot),
        )
        for letter, slot in (("k", groups), ("v", groups + 1))
    ]
    return Leaf((*path, "qkv"), (width, heads, groups + 2, size), tuple(pieces))


def _attention_out(config: LayerConfig, path: Path, name: str) -> Leaf:
    """Map to out [K, G, H, D]."""
    width = config.hidden_size
    shape = (config.num_kv_heads, config.num_groups, config.head_dim, width)
    rows = config.num_heads * config.head_dim
    piece = Piece(f"{name}.weight", (width, rows), (width, *shape[:-1]), (1, 2, 3, 0))
    return Leaf((*path, "out"), shape, (piece,))


def _gate_up(config: LayerConfig, path: Path, prefix: str) -> Leaf:
    """Map to gate_up [D, 2, F]."""
    width, inner = config.hidden_size, config.intermediate_size
    pieces = tuple(
        Piece(f"{prefix}{name}_proj.weight", (inner, width), (inner, width), (1, 0), index)
        for name, index in (("gate", np.s_[:, 0]), ("up", np.s_[:, 1]))
    )
    return Leaf((*path, "gate_up"), (width, 2, inner), pieces)


def _head_norms(config: LayerConfig, attention: Path, prefix: str) -> list[Leaf]:
    """Return the scales by which Qwen3 normalises each query and each key."""
    names = ("query", "key") if config.query_key_norm else ()
    return [
        whole(
            (*attention, f"{name}_norm"),
            f"{prefix}self_attn.{name[0]}_norm.weight",
            (config.head_dim,),
        )
        for name in names
    ]


def _layer_biases(config: LayerConfig, attention: Path, mlp: Path, prefix: str) -> list[Leaf]:
    leaves = []
    if config.qkv_bias:
        leaves.append(_qkv_bias(config, attention, f"{prefix}self_attn."))
    if config.output_bias:
        name = f"{prefix}self_attn.o_proj.bias"
        leaves.append(whole((*attention, "out_bias"), name, (config.hidden_size,)))
    if config.mlp_bias:
        inner = (config.intermediate_size,)
        pieces = tuple(
            Piece(f"{prefix}mlp.{name}_proj.bias", inner, inner, (0,), (slot,))
            for slot, name in enumerate(("gate", "up"))
        )
        leaves.append(Leaf((*mlp, "gate_up_bias"), (2, *inner), pieces))
        name = f"{prefix}mlp.down_proj.bias"
        leaves.append(whole((*mlp, "down_bias"), name, (config.hidden_size,)))
    return leaves


def _qkv_bias(config: LayerConfig, path: Path, prefix: str) -> Leaf:
    heads, groups, size = config.num_kv_heads, config.num_groups, config.head_dim
    every = slice(None)
    split = (heads, groups, size)
    queries = (every, slice(0, groups))
    pieces = [Piece(f"{prefix}q_proj.bias", (config.num_heads * size,), split, (0, 1, 2), queries)]
    pieces += [
        Piece(f"{prefix}{letter}_proj.bias", (heads * size,), (heads, size), (0, 1), (every, slot))
        for letter, slot in (("k", groups), ("v", groups + 1))
    ]
    return Leaf((*path, "qkv_bias"), (heads, groups + 2, size), tuple(pieces))
