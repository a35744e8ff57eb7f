"""The map of tensor names covers exactly what the modules hold, at every size and variant."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from clover_jax.drafters import registry
from clover_jax.interchange.clover2 import clover2_leaves
from clover_jax.pretrained.baichuan import baichuan_leaves
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.shapes import base_shapes
from clover_jax.pretrained.tensor_map import stored_shapes
from tests.tiny_models import LLAMA3_8B, TINY

VARIANTS = {
    "tiny": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "biases": dataclasses.replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "wide heads": dataclasses.replace(TINY, head_dim=16),
    "head norms": dataclasses.replace(TINY, query_key_norm=True),
    "Llama 3 8B": LLAMA3_8B,
}


def assert_cover(leaves, params):
    """Assert that the leaves are those of the params and that their pieces fill them exactly."""
    shapes = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert {leaf.path: leaf.shape for leaf in leaves} == shapes
    for leaf in leaves:
        assert sum(math.prod(piece.shape) for piece in leaf.pieces) == math.prod(leaf.shape), leaf
    assert len(stored_shapes(leaves)) == sum(len(leaf.pieces) for leaf in leaves)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_base_is_covered(variant):
    config = VARIANTS[variant]
    assert_cover(base_leaves(config), base_shapes(config))


def test_a_base_with_one_packed_matrix_is_covered():
    config = dataclasses.replace(TINY, num_kv_heads=TINY.num_heads)
    assert_cover(baichuan_leaves(config), base_shapes(config))


@pytest.mark.parametrize("variant", ["tiny", "biases", "Llama 3 8B"])
def test_the_official_clover2_layout_covers_the_head(variant):
    base = VARIANTS[variant]
    head = registry.head(registry.config_for_base("clover2", base))
    assert_cover(clover2_leaves(head.config), registry.init_shapes(head, base_shapes(base)))


def test_stored_shapes_of_llama_3_8b():
    shapes = stored_shapes(base_leaves(LLAMA3_8B))
    assert len(shapes) == 291
    assert shapes["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)
    assert shapes["model.layers.31.mlp.down_proj.weight"] == (4096, 14_336)
    assert sum(map(math.prod, shapes.values())) == 8_030_261_248


def test_a_piece_fills_what_its_docstring_says():
    """k_proj [K H, D] fills qkv [D, K, G + 2, H] at (:, :, G)."""
    leaf = next(leaf for leaf in base_leaves(TINY) if leaf.path[-1] == "qkv")
    piece = leaf.pieces[1]
    width, heads, size = TINY.hidden_size, TINY.num_kv_heads, TINY.head_dim
    assert piece.name == "model.layers.0.self_attn.k_proj.weight"
    assert (piece.split, piece.axes) == ((heads, size, width), (2, 0, 1))
    assert piece.index == (slice(None), slice(None), TINY.layer.num_groups)
    stored = jnp.arange(heads * size * width).reshape(piece.shape)
    assert piece.to_ours(stored)[5, 1, 3] == stored[1 * size + 3, 5]
