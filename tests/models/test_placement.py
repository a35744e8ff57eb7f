"""Meshes and placements: what is split over which axis, and what is refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from clover_jax.checkpoints.shapes import base_shapes, shape_config
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.models.meshes import MeshShape, make_abstract_mesh, parse_mesh
from clover_jax.models.placement import (
    bytes_per_device,
    decode_state_shardings,
    param_shardings,
    row_shardings,
)
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state
from tests.tiny_models import LLAMA3_8B, TINY

MESH = make_abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("data=2,tensor=-1", MeshShape(data=2, fsdp=1, tensor=4)),
        ("data=2,fsdp=2,tensor=2", MeshShape(2, 2, 2)),
        (" fsdp = 4 ", MeshShape(1, 4, 1)),
        ("data=-1", MeshShape(data=8)),
        ("tensor=2", MeshShape(tensor=2)),
    ],
)
def test_a_mesh_is_read_from_text(text, expected):
    assert parse_mesh(text, 8) == expected
    assert parse_mesh("data=64,fsdp=4", None) == MeshShape(64, 4, 1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("data=3,fsdp=-1", "8 devices cannot be divided by 3, the product of the other axes"),
        ("data=4,tensor=4", "asks for 16 devices, but 8 are here"),
        ("model=2", "'model=2' must be one of data, fsdp, tensor, each once, with a number from 1"),
        ("data=2,data=2", "'data=2' must be one of"),
        ("data=0", "'data=0' must be"),
        ("data", "'data' must be"),
        ("", "'' must be one of"),
        ("data=-1,fsdp=-1", "-1 is for one axis only; give a number"),
    ],
)
def test_what_is_no_mesh_is_said_with_its_values(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_mesh(text, 8)
    with pytest.raises(UserError, match="-1 needs a known number of devices"):
        parse_mesh("data=-1", None)


def specs(shardings):
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {"/".join(k.key for k in path): sharding.spec for path, sharding in leaves}


def test_the_base_is_split_over_fsdp_and_tensor():
    found = specs(param_shardings(base_shapes(LLAMA3_8B), MESH))
    assert found["embedding"] == found["lm_head"] == P("tensor", "fsdp")
    assert found["final_norm/scale"] == P(None)
    assert found["layers_7/attention/qkv"] == P("fsdp", "tensor", None, None)
    assert found["layers_7/attention/out"] == P("tensor", None, None, "fsdp")
    assert found["layers_7/mlp/gate_up"] == P("fsdp", None, "tensor")
    assert found["layers_7/mlp/down"] == P("tensor", "fsdp")


@pytest.mark.parametrize("kind", registry.DRAFTERS)
def test_every_drafter_has_a_place_for_each_param_and_little_is_replicated(kind):
    base = base_shapes(LLAMA3_8B)
    shapes = registry.init_shapes(registry.head(registry.config_for_base(kind, LLAMA3_8B)), base)
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))
    assert bytes_per_device(shapes, param_shardings(shapes, MESH)) < 1.01 * whole / 4


def test_the_optimizer_lies_where_its_params_do():
    head = registry.head(registry.config_for_base("clover2", TINY))
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0))
    state = jax.eval_shape(lambda base: init_state(config, base, 0), base_shapes(TINY))
    placed = param_shardings(state, MESH)
    is_adam = lambda part: hasattr(part, "mu")  # noqa: E731
    parts = jax.tree.leaves(placed.opt_state, is_leaf=is_adam)
    adam = next(part for part in parts if is_adam(part))
    assert adam.mu == adam.nu == placed.params
    assert adam.count.spec == placed.step.spec == P()


def test_norms_of_queries_are_on_every_device_and_experts_split_by_width_and_sinks_by_heads():
    config = dataclasses.replace(TINY, query_key_norm=True)
    found = specs(param_shardings(base_shapes(config), MESH))
    names = ("query_norm", "key_norm")
    assert [found[f"layers_0/attention/{name}"] for name in names] == [P(None), P(None)]
    base = shape_config("shape:gpt-oss-20b:1")
    found = specs(param_shardings(base_shapes(base), MESH))
    names = ("attention/sinks", "mlp/expert_gate", "mlp/expert_down", "mlp/router")
    experts = [P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp"), P("fsdp", None)]
    assert [found[f"layers_0/{name}"] for name in names] == [P("tensor", None), *experts]


def test_fewer_heads_than_shards_are_on_every_device_and_decoder_heads_are_cut():
    mesh = make_abstract_mesh(MeshShape(tensor=8))
    found = specs(param_shardings(base_shapes(TINY), mesh))  # 2 key/value heads
    assert found["layers_0/attention/qkv"] == P("fsdp", None, None, None)
    assert found["layers_0/mlp/down"] == P("tensor", "fsdp")
    base = shape_config("shape:gemma3-27b:1")  # 42 heads of 128 for an Attention Decoder
    head = registry.head(registry.config_for_base("clover2", base))
    mesh = make_abstract_mesh(MeshShape(fsdp=2, tensor=4))
    found = specs(param_shardings(registry.init_shapes(head, base_shapes(base)), mesh))
    names = ("query", "query_bias", "key_value", "key_value_bias")
    query, both = ("fsdp", None, "tensor"), ("fsdp", None, None, "tensor")
    expected = [P(*query), P(*query[1:]), P(*both), P(*both[1:])]
    assert [found[f"attention_decoder_1/{name}"] for name in names] == expected


def test_an_unknown_leaf_is_an_error_that_says_where_its_rule_goes():
    params = {"block": {"gate": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    message = "parameter block/gate with 2 dimensions has no rule .* PARAM_LAYOUTS"
    with pytest.raises(UserError, match=message):
        param_shardings(params, MESH)
    # A width that its axis does not divide is named too.
    mesh = make_abstract_mesh(MeshShape(fsdp=3))
    with pytest.raises(UserError, match="embedding: its dimension D of 32 .* over fsdp=3"):
        param_shardings(base_shapes(TINY), mesh)


def test_rows_are_split_over_data_and_fsdp_or_refused_and_caches_by_heads_too():
    row = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    assert row_shardings(row, MESH).spec == P(("data", "fsdp"))
    with pytest.raises(UserError, match="--batch_size=6 must be divisible by data x fsdp = 4"):
        row_shardings(jax.ShapeDtypeStruct((6, 16), jnp.int32), MESH)
    head = registry.head(registry.config_for_base("clover2", TINY))
    tree = parse_tree("chain:2")

    def place(batch):
        state = jax.eval_shape(lambda: empty_state(TINY, head, tree, batch, 64, 4, jnp.float32))
        return decode_state_shardings(state, MESH)

    assert place(4).cache[0].key.spec == P(("data", "fsdp"), "tensor")
    assert place(4).draft_cache[0].value.spec == P(("data", "fsdp"), "tensor")
    assert place(4).tokens.spec == P(("data", "fsdp"))
    assert place(1).cache[0].key.spec == P(None, "tensor")
