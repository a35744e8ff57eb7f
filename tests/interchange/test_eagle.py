"""The official EAGLE-1 layout: writing reverses reading, and errors name things."""

import dataclasses
import json

import numpy as np
import pytest

from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
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
    return copy_of(reference_dir / "eagle1", tmp_path / "eagle1")


def test_reading_and_writing_gives_the_same_tensors(reference_dir, tmp_path, base):
    config, params = read_layout("eagle", reference_dir / "eagle1", base)
    write_layout("eagle", tmp_path / "written", config, params, base)
    assert_same_tensors(reference_dir / "eagle1", tmp_path / "written")
    fields = json.loads((reference_dir / "eagle1" / "config.json").read_text())
    found = json.loads((tmp_path / "written" / "config.json").read_text())
    named = ("architectures", "vocab_size", "num_hidden_layers", "rope_theta", "bias")
    assert [found[name] for name in named] == [fields[name] for name in named]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        {"qkv_bias": True, "mlp_bias": True, "rope": RopeConfig(theta=5e5)},
        {"rope": RopeConfig(5e5, "llama3", 8.0), "num_kv_heads": 4},
        {"rope": RopeConfig(1e4, "linear", 2.0), "output_bias": True},
    ],
    ids=["tied", "biases", "llama3", "linear"],
)
def test_writing_and_reading_gives_the_same_head(tmp_path, changes):
    base = random_base(tmp_path, dataclasses.replace(TINY, **changes))
    config = registry.config_for_base("eagle", base.config)
    config = dataclasses.replace(config, fc_bias=not base.config.qkv_bias)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    write_layout("eagle", tmp_path / "head", config, params, base)
    found_config, found_params = read_layout("eagle", tmp_path / "head", base)
    assert found_config == config
    assert_trees_equal(found_params, params)


def test_the_rotary_base_is_the_configs_else_10_000_unless_given(folder, base):
    edit_json(folder / "config.json", rope_theta=5e5)
    assert read_layout("eagle", folder, base)[0].layer.rope == RopeConfig(theta=5e5)
    edit_json(folder / "config.json", rope_theta=...)
    assert read_layout("eagle", folder, base)[0].layer.rope == RopeConfig(theta=1e4)
    assert read_layout("eagle", folder, base, rope_theta=2e5)[0].layer.rope == RopeConfig(theta=2e5)


def test_a_copy_of_another_embedding_is_refused(folder, base):
    def spoil(tensors):
        tensors["embed_tokens.weight"][7, 3] += 0.5

    edit_tensors(folder, spoil)
    message = "embed_tokens.weight differs from the input embedding of the base .*first in row 7"
    with pytest.raises(UserError, match=message):
        read_layout("eagle", folder, base)
    read_layout("eagle", folder, base, allow_base_mismatch=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.bias"), r"lacks tensor fc\.bias, which its config.json asks for"),
        (lambda t: t.update(extra=np.ones(3, np.float32)), "has tensor extra, which its config"),
        (
            lambda t: t.update({"fc.weight": np.ones((32, 32), np.float32)}),
            r"fc\.weight has shape \(32, 32\); config.json asks for \(32, 64\)",
        ),
        (lambda t: t["fc.weight"].fill(np.inf), r"tensor fc\.weight holds values that are not fin"),
    ],
)
def test_wrong_tensors_are_named(folder, base, edit, message):
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=message):
        read_layout("eagle", folder, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": False}, r"has tensor fc\.bias, which its config.json does not ask for"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE head has 1"),
        ({"vocab_size": 95}, "the head's vocab_size is 95, that of the base .* is 96; give the"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, base, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        read_layout("eagle", folder, base)
