"""Where the tensors of the official Clover-2 layout lie in our head's params."""

from __future__ import annotations

import numpy as np

from clover_jax.config import LayerConfig
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.pretrained.llama_tensors import layer_leaves, norm_leaf
from clover_jax.pretrained.tensor_map import Leaf, Piece, transposed, whole


def clover2_leaves(config: Clover2Config) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.clover2.Clover2`'s params."""
    width = config.layer.hidden_size
    leaves = _attention_decoder(config.layer, "attention_decoder_1", "clover_head_mlp_rnn")
    for index in range(config.num_augmenting_layers):
        leaves += layer_leaves(config.layer, (f"augmenting_{index}",), f"layers.{index}.")
    leaves += _attention_decoder(config.layer, "attention_decoder_2", "clover_head_mlp_rnn2")
    return [
        *leaves,
        norm_leaf(("trunk_norm",), "clover_norm", width),
        norm_leaf(("head_norm",), "clover_head_norm", width),
        transposed(("projector_0",), "clover_head_mlp.weight", (width, width)),
        whole(("projector_0_bias",), "clover_head_mlp.bias", (width,)),
        _projector_1(width),
        whole(("projector_1_bias",), "clover_head_mlp2.bias", (width,)),
    ]


def _projector_1(width: int) -> Leaf:
    """Map to projector_1 [2, D, D], state first, from [D, 2D] over concat(state, token)."""
    piece = Piece("clover_head_mlp2.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    return Leaf(("projector_1",), (2, width, width), (piece,))


def _attention_decoder(config: LayerConfig, name: str, stored: str) -> list[Leaf]:
    """Map to query [D, N, H] and key_value [D, 2, N, H] with their biases."""
    width, heads = config.hidden_size, (config.num_heads, config.head_dim)
    matrix, split = (width, width), (*heads, width)

    def weight(letter: str, index: tuple = (...,)) -> Piece:
        return Piece(f"{stored}.{letter}.weight", matrix, split, (2, 0, 1), index)

    def bias(letter: str, index: tuple = (...,)) -> Piece:
        return Piece(f"{stored}.{letter}.bias", (width,), heads, (0, 1), index)

    key_value = (weight("k", np.s_[:, 0]), weight("v", np.s_[:, 1]))
    key_value_bias = (bias("k", np.s_[0,]), bias("v", np.s_[1,]))
    return [
        norm_leaf((name, "norm"), f"{stored}.input_layernorm", width),
        Leaf((name, "query"), (width, *heads), (weight("q"),)),
        Leaf((name, "query_bias"), heads, (bias("q"),)),
        Leaf((name, "key_value"), (width, 2, *heads), key_value),
        Leaf((name, "key_value_bias"), (2, *heads), key_value_bias),
    ]
