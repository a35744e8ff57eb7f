"""Where the tensors of a Hugging Face Llama checkpoint lie in our params.

The rotary form needs no permutation: Hugging Face stores the half-split one, as we use it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from clover_jax.array_types import LeafPath
from clover_jax.checkpoints.tensor_map import Leaf, Piece, transposed, whole
from clover_jax.config import BaseConfig, LayerConfig

# Norms around the MLP, ours -> stored, by `post_norms`. With them "post_attention" really follows
# attention.
_NORMS_AROUND_MLP = {
    False: {"mlp_norm": "post_attention"},
    True: {
        "attention_post_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_post_norm": "post_feedforward",
    },
}


def base_leaves(config: BaseConfig, prefix: str = "") -> list[Leaf]:
    """Return the leaves of the base in the order of the forward pass.

    prefix: prepended to every name.
    """
    matrix = (config.vocab_size, config.hidden_size)
    leaves = [whole(("embedding",), f"{prefix}model.embed_tokens.weight", matrix)]
    for index in range(config.num_layers):
        path, of_layer = (f"layers_{index}",), f"{prefix}model.layers.{index}."
        leaves += layer_leaves(config.layer_at(index), path, of_layer)
    leaves.append(norm_leaf(("final_norm",), f"{prefix}model.norm", config.hidden_size))
    # The embedding of a tied base is its output matrix too.
    if not config.tie_word_embeddings:
        leaves.append(whole(("lm_head",), f"{prefix}lm_head.weight", matrix))
    return leaves


def packed_leaves(config: BaseConfig, names: Mapping[str, str]) -> list[Leaf]:
    """Return `base_leaves` where the parts of some leaves are stacked in one stored matrix.

    names: stored name of each packed matrix, by the last key of its leaf: {"qkv": "W_pack"}.
    """
    leaves = base_leaves(config)
    for index, leaf in enumerate(leaves):
        if leaf.path[-1] not in names:
            continue
        # "...self_attn.q_proj.weight" becomes "...self_attn.W_pack.weight".
        stored = re.sub(r"\w+_proj", names[leaf.path[-1]], leaf.pieces[0].name)
        # ends[i]: the row of the stored matrix where part i ends and the next one begins.
        ends = list(itertools.accumulate(piece.shape[0] for piece in leaf.pieces))
        pieces = tuple(
            dataclasses.replace(
                piece,
                name=stored,
                shape=(ends[-1], piece.shape[1]),
                part=(slice(end - piece.shape[0], end),),
            )
            for piece, end in zip(leaf.pieces, ends, strict=True)
        )
        leaves[index] = dataclasses.replace(leaf, pieces=pieces)
    return leaves


def layer_leaves(
    config: LayerConfig,
    path: LeafPath,
    prefix: str,
    input_norm: bool = True,
    read_width: int | None = None,
) -> list[Leaf]:
    """Return the leaves of one decoder layer, at `path` in our tree.

    prefix: the start of its stored names, such as "model.layers.0.".
    read_width: columns that its attention reads; None is the hidden size.
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads, groups, size = config.num_kv_heads, config.num_groups, config.head_dim
    attention, mlp, every = (*path, "attention"), (*path, "mlp"), slice(None)
    read = read_width or width
    leaves = []
    if input_norm and config.pre_norms:
        leaves.append(norm_leaf((*path, "attention_norm"), f"{prefix}input_layernorm", width))

    # qkv [D, K, G + 2, H]: for each key/value head its G queries, its key, its value. One product
    # makes them all, and a shard holds a head next to the queries that read it.
    queries = 2 * groups if config.output_gate else groups  # gates are stored as queries
    slots: dict[str, tuple[tuple[int, ...], int | slice]] = {
        "q": ((heads, queries, size), slice(0, queries)),
        "k": ((heads, size), queries),
        "v": ((heads, size), queries + 1),
    }
    for letter in "kv" if config.shares_keys else "v" if config.keys_as_values else "":
        del slots[letter]
    pieces, biases = [], []
    for letter, (split, slot) in slots.items():
        name, rows, axes = f"{prefix}self_attn.{letter}_proj", math.prod(split), range(len(split))
        weight = Piece(f"{name}.weight", (rows, read), (*split, read), (len(split), *axes))
        pieces.append(dataclasses.replace(weight, index=(every, every, slot)))
        biases.append(Piece(f"{name}.bias", (rows,), split, tuple(axes), (every, slot)))
    fused = (heads, queries + len(slots) - 1, size)
    leaves.append(Leaf((*attention, "qkv"), (read, *fused), tuple(pieces)))

    # out [K, G, H, D], stored as [D, N H]: query head n is number n % G of those that read
    # key/value head n // G.
    stored = (width, config.num_heads * size)
    split = (width, heads, groups, size)
    piece = Piece(f"{prefix}self_attn.o_proj.weight", stored, split, (1, 2, 3, 0))
    leaves.append(Leaf((*attention, "out"), (*split[1:], width), (piece,)))
    for ours, name in _NORMS_AROUND_MLP[config.post_norms].items():
        if ours == "mlp_norm" and not config.pre_norms:
            continue
        leaves.append(norm_leaf((*path, ours), f"{prefix}{name}_layernorm", width))

    # gate_up [D, 2, F]: one product makes both.
    sides = {f"{prefix}mlp.gate_proj": 0, f"{prefix}mlp.up_proj": 1}
    shape = (inner, width)
    gate_up = tuple(
        Piece(f"{name}.weight", shape, shape, (1, 0), (every, side)) for name, side in sides.items()
    )
    leaves.append(Leaf((*mlp, "gate_up"), (width, 2, inner), gate_up))
    leaves.append(transposed((*mlp, "down"), f"{prefix}mlp.down_proj.weight", (inner, width)))

    # Parts that not every family has.
    if config.query_key_norm:  # Qwen3 normalizes each query and each key
        for name in ("query",) if config.shares_keys else ("query", "key"):
            norm = f"{prefix}self_attn.{name[0]}_norm.weight"
            leaves.append(whole((*attention, f"{name}_norm"), norm, (size,)))
    if config.joint_head_norm:  # OLMo normalizes all of them together
        for ours, letter, entries in (
            ("queries_norm", "q", (heads, groups, size)),
            ("keys_norm", "k", (heads, size)),
        ):
            norm, every_axis = f"{prefix}self_attn.{letter}_norm.weight", tuple(range(len(entries)))
            piece = Piece(norm, (math.prod(entries),), entries, every_axis)
            leaves.append(Leaf((*attention, ours), entries, (piece,)))
    if config.scaled_output:
        leaves.append(whole((*path, "scale"), f"{prefix}layer_scalar", (1,)))
    if config.sinks:  # one for each query head
        shape = (heads, groups)
        piece = Piece(f"{prefix}self_attn.sinks", (config.num_heads,), shape, (0, 1))
        leaves.append(Leaf((*attention, "sinks"), shape, (piece,)))
    if config.qkv_bias:
        leaves.append(Leaf((*attention, "qkv_bias"), fused, tuple(biases)))
    if config.output_bias:
        leaves.append(whole((*attention, "out_bias"), f"{prefix}self_attn.o_proj.bias", (width,)))
    if config.mlp_bias:
        bias = tuple(
            Piece(f"{name}.bias", (inner,), (inner,), (0,), (side,)) for name, side in sides.items()
        )
        leaves.append(Leaf((*mlp, "gate_up_bias"), (2, inner), bias))
        leaves.append(whole((*mlp, "down_bias"), f"{prefix}mlp.down_proj.bias", (width,)))
    return leaves


def renamed(leaves: list[Leaf], rename: Callable[[str], str]) -> list[Leaf]:
    """Return leaves whose stored tensors have other names."""

    def named(piece: Piece) -> Piece:
        return dataclasses.replace(piece, name=rename(piece.name))

    return [dataclasses.replace(leaf, pieces=tuple(map(named, leaf.pieces))) for leaf in leaves]


def norm_leaf(path: LeafPath, name: str, width: int) -> Leaf:
    """Return the scale of an RMSNorm."""
    return whole((*path, "scale"), f"{name}.weight", (width,))


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of one architecture are read; the defaults are Llama's.

    parse: reads the fields of config.json, whose path is for messages.
    leaves: where the stored tensors lie in the params.
    adjust: changes a stored tensor, from the fields of config.json, its name and itself.
    ignored: names of stored tensors that no text needs, as a regular expression; "" for none. In
        it <layers> stands for the number of layers.
    alternative: `leaves` of folders that store a layer's experts in another way; None where the
        family's always lie in one way.
    """

    parse: Callable[[dict[str, Any], FilePath], BaseConfig]
    leaves: Callable[[BaseConfig], list[Leaf]] = base_leaves
    # Few families change the values of a tensor.
    adjust: Callable[[dict[str, Any], str, np.ndarray], np.ndarray] = lambda _, __, tensor: tensor
    ignored: str = ""
    alternative: Callable[[BaseConfig], list[Leaf]] | None = None
