"""Where the tensors of a Hugging Face Llama checkpoint lie in our params.

The rotary form needs no permutation: Hugging Face stores the half-split one, as we use it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from clover_jax.config import BaseConfig, LayerConfig
from clover_jax.pretrained.tensor_map import Leaf, Path, Piece, transposed, whole

_EVERY = slice(None)
# By whether there are norms after attention and MLP: "post_attention" then means what it says.
_NORMS_AROUND_MLP = {
    False: {"mlp_norm": "post_attention"},
    True: {
        "attention_post_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_post_norm": "post_feedforward",
    },
}


def base_leaves(config: BaseConfig, prefix: str = "") -> list[Leaf]:
    """Return all leaves of the base, in the order of the forward pass.

    prefix: what all stored names start with, where the text is a part of a model.
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
    """Return `base_leaves` with some read from one stored matrix, their parts below each other.

    names: of such a matrix, by the last key of its leaf: {"qkv": "W_pack"}.
    """
    leaves = base_leaves(config)
    return [
        _packed(leaf, names[leaf.path[-1]]) if leaf.path[-1] in names else leaf for leaf in leaves
    ]


def _packed(leaf: Leaf, name: str) -> Leaf:
    # ends[i]: the row of the stored matrix where part i ends and the next one begins.
    ends = list(itertools.accumulate(piece.shape[0] for piece in leaf.pieces))
    # The stored name: "...self_attn.q_proj.weight" becomes "...self_attn.W_pack.weight".
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
    # Parts that every layer has.
    attention, mlp = (*path, "attention"), (*path, "mlp")
    width, inner = config.hidden_size, config.intermediate_size
    norm = norm_leaf((*path, "attention_norm"), f"{prefix}input_layernorm", width)
    leaves = [
        *([norm] if input_norm else []),
        _qkv(config, attention, f"{prefix}self_attn.", read_width or width),
        _attention_out(config, attention, f"{prefix}self_attn.o_proj"),
        *[
            norm_leaf((*path, ours), f"{prefix}{stored}_layernorm", width)
            for ours, stored in _NORMS_AROUND_MLP[config.post_norms].items()
        ],
        _gate_up(config, mlp, f"{prefix}mlp."),
        transposed((*mlp, "down"), f"{prefix}mlp.down_proj.weight", (inner, width)),
    ]

    # Parts that not every family has.
    if config.query_key_norm:  # Qwen3 normalises each query and each key
        for name in ("query", "key"):
            stored = f"{prefix}self_attn.{name[0]}_norm.weight"
            leaves.append(whole((*attention, f"{name}_norm"), stored, (config.head_dim,)))
    if config.sinks:  # one for each query head
        shape = (config.num_kv_heads, config.num_groups)
        piece = Piece(f"{prefix}self_attn.sinks", (config.num_heads,), shape, (0, 1))
        leaves.append(Leaf((*attention, "sinks"), shape, (piece,)))
    if config.qkv_bias:
        leaves.append(_qkv_bias(config, attention, f"{prefix}self_attn."))
    if config.output_bias:
        leaves.append(whole((*attention, "out_bias"), f"{prefix}self_attn.o_proj.bias", (width,)))
    if config.mlp_bias:
        leaves.append(_gate_up_bias(config, mlp, f"{prefix}mlp."))
        leaves.append(whole((*mlp, "down_bias"), f"{prefix}mlp.down_proj.bias", (width,)))
    return leaves


def norm_leaf(path: Path, name: str, width: int) -> Leaf:
    """Return the scale of an RMSNorm."""
    return whole((*path, "scale"), f"{name}.weight", (width,))


def _qkv(config: LayerConfig, path: Path, prefix: str, width: int) -> Leaf:
    """Map to qkv [D, K, G + 2, H]: for each key/value head its G queries, its key, its value."""
    # Fused, so that one product makes the queries, keys and values of a layer.
    pieces = []
    for letter, (split, slot) in _qkv_slots(config).items():
        name, shape = f"{prefix}{letter}_proj.weight", (math.prod(split), width)
        axes = (len(split), *range(len(split)))  # the width comes first here, there it is last
        pieces.append(Piece(name, shape, (*split, width), axes, (_EVERY, _EVERY, slot)))
    fused = (width, config.num_kv_heads, config.num_groups + 2, config.head_dim)
    return Leaf((*path, "qkv"), fused, tuple(pieces))


def _qkv_bias(config: LayerConfig, path: Path, prefix: str) -> Leaf:
    pieces = []
    for letter, (split, slot) in _qkv_slots(config).items():
        name, axes = f"{prefix}{letter}_proj.bias", tuple(range(len(split)))
        pieces.append(Piece(name, (math.prod(split),), split, axes, (_EVERY, slot)))
    shape = (config.num_kv_heads, config.num_groups + 2, config.head_dim)
    return Leaf((*path, "qkv_bias"), shape, tuple(pieces))


def _qkv_slots(config: LayerConfig) -> dict[str, tuple[tuple[int, ...], int | slice]]:
    """Return how the rows of q, k and v split, and which slots of G + 2 they fill."""
    # A key/value head lies beside the queries that read it, so that a shard holds both.
    heads, groups, size = config.num_kv_heads, config.num_groups, config.head_dim
    return {
        "q": ((heads, groups, size), slice(0, groups)),
        "k": ((heads, size), groups),
        "v": ((heads, size), groups + 1),
    }


def _attention_out(config: LayerConfig, path: Path, name: str) -> Leaf:
    """Map to out [K, G, H, D]."""
    # Stored as [D, N H]: query head n is number n % G of those that read key/value head n // G.
    width = config.hidden_size
    shape = (config.num_kv_heads, config.num_groups, config.head_dim, width)
    rows = config.num_heads * config.head_dim
    piece = Piece(f"{name}.weight", (width, rows), (width, *shape[:-1]), (1, 2, 3, 0))
    return Leaf((*path, "out"), shape, (piece,))


def _gate_up(config: LayerConfig, path: Path, prefix: str) -> Leaf:
    """Map to gate_up [D, 2, F]."""
    # Side by side, so that one product makes both.
    width, inner = config.hidden_size, config.intermediate_size
    pieces = tuple(
        Piece(f"{prefix}{name}_proj.weight", (inner, width), (inner, width), (1, 0), index)
        for name, index in (("gate", np.s_[:, 0]), ("up", np.s_[:, 1]))
    )
    return Leaf((*path, "gate_up"), (width, 2, inner), pieces)


def _gate_up_bias(config: LayerConfig, path: Path, prefix: str) -> Leaf:
    inner = (config.intermediate_size,)
    pieces = tuple(
        Piece(f"{prefix}{name}_proj.bias", inner, inner, (0,), (slot,))
        for slot, name in enumerate(("gate", "up"))
    )
    return Leaf((*path, "gate_up_bias"), (2, *inner), pieces)
