"""The official Clover-2 layout: writing reverses reading, and errors name things."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.interchange.clover2 import COPIES
from clover_jax.pretrained.loading import load_base
from tests.foreign_heads import read_layout, write_layout
from tests.tiny_checkpoints import (
    assert_same_tensors,
    assert_trees_equal,
    copy_of,
    edit_json,
    edit_tensors,
    random_base,
    random_leaves,
)
from tests.tiny_models import TINY


@pytest.fixture(scope="module")
def reference_dir(fixtures_dir):
    return fixtures_dir / "clover2_reference"


@pytest.fixture(scope="module")
def base(reference_dir):
    return load_base(str(reference_dir / "base"))


@pytest.fixture
def folder(reference_dir, tmp_path):
    """A copy of the reference head that a test may spoil."""
    return copy_of(reference_dir / "clover2", tmp_path / "clover2")


def test_reading_and_writing_gives_the_same_tensors(reference_dir, tmp_path, base):
    config, params = read_layout("clover2", reference_dir / "clover2", base)
    write_layout("clover2", tmp_path / "written", config, params, base)
    assert_same_tensors(reference_dir / "clover2", tmp_path / "written")
    fields = json.loads((reference_dir / "clover2" / "config.json").read_text())
    found = json.loads((tmp_path / "written" / "config.json").read_text())
    assert found["clover"] == fields["clover"]
    named = ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_theta")
    assert [found[name] for name in named] == [fields[name] for name in named]


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {"num_positions": 1, "num_augmenting_layers": 1}),
        ({"num_kv_heads": 4}, {"num_positions": 3, "num_augmenting_layers": 3}),
        ({"qkv_bias": True, "output_bias": True, "mlp_bias": True}, {}),
        ({"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, {}),
    ],
)
def test_writing_and_reading_gives_the_same_head(tmp_path, changes, options):
    base = random_base(tmp_path, dataclasses.replace(TINY, **changes))
    config = registry.config_for_base("clover2", base.config, **options)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    write_layout("clover2", tmp_path / "head", config, params, base)
    found_config, found_params = read_layout("clover2", tmp_path / "head", base)
    assert found_config == config
    assert_trees_equal(found_params, params)


def test_the_rotary_base_is_10_000_whatever_the_config_says_unless_given(folder, base):
    edit_json(folder / "config.json", rope_theta=5e5)
    assert read_layout("clover2", folder, base)[0].layer.rope == RopeConfig(theta=10_000.0)
    assert read_layout("clover2", folder, base, rope_theta=5e5)[0].layer.rope == RopeConfig(
        theta=5e5
    )


@pytest.mark.parametrize(
    "rope", [RopeConfig(theta=5e5), RopeConfig(kind="linear", factor=2.0)], ids=["theta", "kind"]
)
def test_a_head_of_another_rotary_base_is_not_written(tmp_path, folder, base, rope):
    config, params = read_layout("clover2", folder, base)
    other = dataclasses.replace(config, layer=dataclasses.replace(config.layer, rope=rope))
    message = (
        rf"rotates with base {rope.theta:.0f} \(type {rope.kind}\), but readers of the official "
        r"Clover-2 layout always use 10000 .*; train the head with --draft_rope_theta=10000"
    )
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        write_layout("clover2", tmp_path / "written", other, params, base)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"alibi": True}, "this head has ALiBi, as its base has, but the official Clover-2 layout"),
        ({"query_key_norm": True}, "this head has query and key norms, as its base has, but"),
        ({"post_norms": True}, "this head has norms after attention and MLP, as its base has, but"),
        ({"sinks": True}, "this head has attention sinks, as its base has, but"),
        ({"qkv_bias": True}, "has qkv_bias True and output_bias False"),
    ],
)
def test_a_head_of_another_family_is_not_written(tmp_path, folder, base, changes, message):
    config, params = read_layout("clover2", folder, base)
    layer = dataclasses.replace(config.layer, **changes)
    with pytest.raises(UserError, match=message):
        write_layout(
            "clover2", tmp_path / "w", dataclasses.replace(config, layer=layer), params, base
        )
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("change", [{"order": "block_first"}, {"output_projector": False}])
def test_an_ablated_head_is_not_written(tmp_path, folder, base, change):
    config, params = read_layout("clover2", folder, base)
    other = dataclasses.replace(config, **change)
    with pytest.raises(UserError, match="official Clover-2 layout holds heads with 'decoder_fir"):
        write_layout("clover2", tmp_path / "written", other, params, base)


def test_a_bfloat16_file_fits_a_float32_base(folder, base):
    def to_bfloat16(tensors):
        tensors.update({name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})

    edit_tensors(folder, to_bfloat16)
    _, params = read_layout("clover2", folder, base)
    assert params["projector_0"].dtype == jnp.float32
    assert (
        read_layout("clover2", folder, base, jnp.bfloat16)[1]["projector_0"].dtype == jnp.bfloat16
    )


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_another_output_matrix_are_refused(folder, base, name):
    def spoil(tensors):
        tensors[name][7, 3] += 0.5

    edit_tensors(folder, spoil)
    message = rf"{name} differs from the output matrix of the base .*base \(first in row 7\); give"
    with pytest.raises(UserError, match=message):
        read_layout("clover2", folder, base)
    read_layout("clover2", folder, base, allow_base_mismatch=True)


def test_a_missing_tensor_is_named(folder, base):
    edit_tensors(folder, lambda tensors: tensors.pop("clover_head_mlp_rnn2.k.bias"))
    with pytest.raises(UserError, match=r"lacks tensor clover_head_mlp_rnn2\.k\.bias, which"):
        read_layout("clover2", folder, base)


def test_an_extra_tensor_is_named(folder, base):
    extra = {"layers.2.input_layernorm.weight": np.ones(32, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(UserError, match=r"has tensor layers\.2\.input_layernorm\.weight, which"):
        read_layout("clover2", folder, base)


def test_a_misshapen_tensor_is_named(folder, base):
    wrong = {"clover_head_mlp2.weight": np.zeros((32, 32), np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(wrong))
    message = r"clover_head_mlp2\.weight has shape \(32, 32\); config.json asks for \(32, 64\)"
    with pytest.raises(UserError, match=message):
        read_layout("clover2", folder, base)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"clover": ...}, 'an official Clover-2 head without the "clover" object in its config'),
        ({"clover": 5}, 'has no "clover" object; it is not an official Clover-2 head'),
        ({"clover": {"num_heads": 5}}, "clover.num_layers must be a positive whole number, not No"),
        ({"clover": {"num_heads": 0, "num_layers": 2}}, "clover.num_heads must be a positive wh"),
        ({"vocab_size": 95}, "the head's vocab_size is 95, that of the base .* is 96; give the"),
        ({"hidden_size": 64}, "the head's hidden_size is 64, that of the base .* is 32; give the"),
        ({"head_dim": 16}, r"splits the width \(32\) in num_heads \(4\) parts, .* head_dim \(16\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, base, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        read_layout("clover2", folder, base)
