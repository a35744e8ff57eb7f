"""Bases without a checkpoint: known shapes, random weights."""

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.shapes import (
    SHAPES,
    base_shapes,
    random_params,
    shape_config,
    shape_notice,
)
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.errors import UserError
from tests.tiny_models import decode_all

BILLION = 1e9


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8.03),  # the sizes that their model cards state
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("gpt-oss-20b", 20.91),
        ("gemma3-27b", 27.01),  # of the text: images take 0.42 more
        ("llama2-7b", 6.74),
        ("vicuna-7b", 6.74),
        ("mistral-7b", 7.25),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-8b", 8.19),
        ("llama-100m", 0.1247),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model(name, parameters):
    def count(layers):  # all layers are alike, and tracing a hundred takes seconds
        shapes = base_shapes(shape_config(f"shape:{name}:{layers}"), jnp.bfloat16)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes)) / BILLION

    first, second = count(1), count(2)
    counted = first + (SHAPES[name].num_layers - 1) * (second - first)
    assert counted == pytest.approx(parameters, rel=0.002)


def test_a_generic_shape_has_heads_of_64():
    config = shape_config("shape:192x2x100")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (192, 2, 100)
    assert (config.num_heads, config.head_dim, config.intermediate_size) == (3, 64, 512)


def test_a_shape_may_have_fewer_layers():
    assert shape_config("shape:llama3-8b:4").num_layers == 4
    assert shape_config("shape:llama3-8b").num_layers == 32


def test_random_weights_are_the_same_again_and_in_the_dtype_asked_for():
    first = load_base("shape:64x1x32", jnp.bfloat16)
    again = load_base("shape:64x1x32", jnp.bfloat16)
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail("differs"), first.params, again.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(first.params)} == {jnp.dtype(jnp.bfloat16)}
    other = random_params(base_shapes(first.config, jnp.bfloat16), seed=1)
    assert (other["lm_head"] != first.lm_head).any()
    assert (first.params["final_norm"]["scale"] == 1).all()


def test_a_shape_decodes():
    base = load_base("shape:64x1x32")
    engine = Engine(base.config, None, TreeConfig.root_only())
    (row,) = decode_all(engine, base.params, None, [[1, 2, 3]], 5)
    assert len(row.output_ids) == 5


def test_every_leaf_can_be_placed_by_the_caller():
    placed = []
    load_base("shape:64x1x32", place=lambda path, leaf: placed.append(path) or leaf)
    assert ("layers_0", "attention", "qkv") in placed
    assert len(placed) == 9


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("shape:gpt5", "'shape:gpt5' is unknown; the shapes are llama3-8b, .*shape:512x8x8192"),
        ("shape:llama3-8b:few", "shape:llama3-8b:few' is unknown"),
        ("shape:100x2x32", r"the width \(100\) must be a multiple of 64"),
        ("shape:0x2x32", r"the width \(0\) must be a multiple of 64, .* at least 1"),
    ],
)
def test_an_impossible_shape_is_a_user_s_mistake(source, said):
    with pytest.raises(UserError, match=said):
        load_base(source)


def test_only_shapes_carry_a_notice():
    assert shape_notice("builtin:tiny") is None
    assert "shape:llama2-7b has random weights" in shape_notice("shape:llama2-7b")
