"""The map of tensor names covers exactly what the modules hold, at every size and variant."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from clover_jax.checkpoints.clover2 import clover2_leaves
from clover_jax.checkpoints.expert_tensors import MIXTRAL, gpt_oss_leaves
from clover_jax.checkpoints.llama_kin import BAICHUAN, PHI3
from clover_jax.checkpoints.llama_tensors import base_leaves
from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.checkpoints.tensor_map import fuse, stored_shapes
from clover_jax.drafters import registry
from clover_jax.models.meshes import MeshShape, make_abstract_mesh
from clover_jax.models.param_layouts import param_spec
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


def random_tensors(leaves):
    """Return the stored tensors of leaves, with random values."""
    rng, shapes = np.random.default_rng(0), stored_shapes(leaves)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_base_is_covered_and_a_clover2_head_by_the_official_layout(variant):
    config = VARIANTS[variant]
    assert_cover(base_leaves(config), base_shapes(config))
    if variant in ("tiny", "biases", "Llama 3 8B"):
        head = registry.head(registry.config_for_base("clover2", config))
        assert_cover(clover2_leaves(head.config), registry.init_shapes(head, base_shapes(config)))


@pytest.mark.parametrize(
    ("leaves_of", "names"),
    [
        (BAICHUAN.leaves, {"W_pack": "qkv"}),
        (PHI3.leaves, {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}),
    ],
)
def test_a_packed_matrix_holds_others_below_each_other(leaves_of, names):
    apart = random_tensors(base_leaves(TINY))
    packed, own = {}, stored_shapes(leaves_of(TINY))
    for name, shape in own.items():
        matrix = name.split(".")[-2]
        parts = [name.replace(matrix, f"{part}_proj") for part in names.get(matrix, ())]
        packed[name] = np.concatenate([apart[part] for part in parts]) if parts else apart[name]
        assert packed[name].shape == shape

    for leaf, of_llama in zip(leaves_of(TINY), base_leaves(TINY), strict=True):
        assert leaf.path == of_llama.path
        expected = fuse(of_llama, apart.__getitem__)
        np.testing.assert_array_equal(fuse(leaf, packed.__getitem__), expected)


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
    assert piece.index == (slice(None), slice(None), TINY.head_layer.num_groups)
    stored = jnp.arange(heads * size * width).reshape(piece.shape)
    assert piece.to_ours(stored)[5, 1, 3] == stored[1 * size + 3, 5]


EXPERTS = dataclasses.replace(TINY, num_experts=4, experts_per_token=2, expert_size=24)
FAMILIES = {
    "llama": (base_leaves, VARIANTS["biases"]),
    "phi3": (PHI3.leaves, TINY),
    "baichuan": (BAICHUAN.leaves, dataclasses.replace(TINY, num_kv_heads=TINY.num_heads)),
    "mixtral": (MIXTRAL.leaves, EXPERTS),
    "gpt-oss": (gpt_oss_leaves, dataclasses.replace(EXPERTS, sinks=True, expert_bias=True)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_of_a_leaf_is_that_part_of_it(family):
    leaves_of, config = FAMILIES[family]
    leaves = leaves_of(config)
    stored = {n: x.astype(ml_dtypes.bfloat16) for n, x in random_tensors(leaves).items()}
    mesh = make_abstract_mesh(MeshShape(fsdp=2, tensor=2))
    for leaf in leaves:
        whole = fuse(leaf, stored.__getitem__)
        for piece in leaf.pieces:  # as the map says it, without the order in which it is copied
            np.testing.assert_array_equal(whole[piece.index], piece.to_ours(stored[piece.name]))
        spec = param_spec(leaf.path, leaf.shape, mesh)
        for box in boxes(leaf.shape, spec, mesh):
            np.testing.assert_array_equal(fuse(leaf, stored.__getitem__, box), whole[box])


def boxes(shape, spec, mesh):
    """Every box that a device of the mesh has."""
    parts = [1 if axis is None else mesh.shape[axis] for axis in spec]
    for place in np.ndindex(*parts):
        sizes = [size // count for size, count in zip(shape, parts, strict=True)]
        yield tuple(
            slice(i * n, (i + 1) * n) if count > 1 else slice(None)
            for i, n, count in zip(place, sizes, parts, strict=True)
        )
