"""The official EAGLE-3 layout: writing reverses reading, and errors name things."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.interchange.directory import load_draft
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

STATES = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def reference_dir(fixtures_dir):
    return fixtures_dir / "eagle3_reference"


@pytest.fixture(scope="module")
def base(reference_dir):
    return load_base(str(reference_dir / "base"))


@pytest.fixture
def folder(reference_dir, tmp_path):
    """A copy of the reference head that a test may spoil."""
    return copy_of(reference_dir / "eagle3", tmp_path / "eagle3")


@pytest.mark.parametrize(("entered", "left"), [([2, 4, 5], [1, 3, 4]), ([], [])])
def test_it_is_recognised_and_loads_as_a_draft(folder, base, entered, left):
    # What vLLM and SGLang may say besides, of the same states.
    edit_json(folder / "config.json", **{STATES: entered}, norm_before_residual=False)
    edit_json(folder / "config.json", eagle_config={STATES: left})
    draft = load_draft(folder, base, rope_theta=5e5)
    assert draft.provenance == {"layout": "eagle3"}
    assert draft.head.config.draft_vocab_size == 40
    assert draft.head.config.layer.rope.theta == 5e5


def test_reading_and_writing_gives_the_same_tensors(reference_dir, tmp_path, base):
    config, params = read_layout("eagle3", reference_dir / "eagle3", base)
    write_layout("eagle3", tmp_path / "written", config, params, base)
    assert_same_tensors(reference_dir / "eagle3", tmp_path / "written")
    fields = json.loads((reference_dir / "eagle3" / "config.json").read_text())
    found = json.loads((tmp_path / "written" / "config.json").read_text())
    named = ("architectures", "vocab_size", "draft_vocab_size", "num_hidden_layers", "rope_theta")
    assert [found[name] for name in named] == [fields[name] for name in named]


@pytest.mark.parity
def test_a_published_head_s_pytorch_file_is_read_with_its_tables(folder, base):
    torch = pytest.importorskip("torch")
    tensors = load_file(folder / "model.safetensors")
    wanted = read_layout("eagle3", folder, base)
    (folder / "model.safetensors").unlink()
    torch.save({k: torch.tensor(v) for k, v in tensors.items()}, folder / "pytorch_model.bin")
    found = read_layout("eagle3", folder, base)
    assert found[0] == wanted[0]
    assert_trees_equal(found[1], wanted[1])


@pytest.mark.parametrize("table", [None, (0, 5, 6, 95)], ids=["full", "four"])
def test_writing_and_reading_gives_the_same_head(tmp_path, table):
    changes = {"num_layers": 8, "rope": RopeConfig(5e5, "llama3", 8.0), "qkv_bias": True}
    base = random_base(tmp_path, dataclasses.replace(TINY, **changes))
    config = registry.config_for_base("eagle3", base.config)
    config = dataclasses.replace(config, draft_to_target=table)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    write_layout("eagle3", tmp_path / "head", config, params, base)
    found_config, found_params = read_layout("eagle3", tmp_path / "head", base)
    assert found_config == config
    assert_trees_equal(found_params, params)


def test_a_head_over_the_whole_vocabulary_needs_no_tables(tmp_path):
    """vLLM has no place for them then; other programs write the identity's."""
    base = random_base(tmp_path, dataclasses.replace(TINY, num_layers=8))
    config = registry.config_for_base("eagle3", base.config)
    shapes = registry.init_shapes(registry.head(config), base.params)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    write_layout("eagle3", tmp_path / "head", config, params, base)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "head" / "model.safetensors").keys()
    assert read_layout("eagle3", tmp_path / "head", base)[0] == config

    tables = {"d2t": np.zeros(96, np.int64), "t2d": np.ones(96, bool)}
    edit_tensors(tmp_path / "head", lambda tensors: tensors.update(tables))
    assert read_layout("eagle3", tmp_path / "head", base)[0] == config
    edit_tensors(tmp_path / "head", lambda tensors: tensors.pop("t2d"))
    with pytest.raises(UserError, match=r"tensor t2d must have shape \(96,\), .*; found none"):
        read_layout("eagle3", tmp_path / "head", base)


def test_a_head_that_reads_other_states_is_not_written(tmp_path):
    base = random_base(tmp_path)
    config = registry.config_for_base("eagle3", base.config)
    with pytest.raises(UserError, match=r"reads layer_1, layer_1, pre_norm, but readers of the"):
        write_layout("eagle3", tmp_path / "head", config, {}, base)
    assert not (tmp_path / "head").exists()


def spoil_kept(tensors):
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"lacks tensor norm\.weight, which its config.json asks"),
        (lambda t: t.update(extra=np.ones(3, np.float32)), "has tensor extra, which its config"),
        (lambda t: t.pop("d2t"), r"tensor d2t must have shape \(40,\), .*; found none"),
        (spoil_kept, "d2t and t2d disagree: draft ids"),
        (
            lambda t: t.update(d2t=t["d2t"].astype(np.float32)),
            "tensor d2t is stored as F32; the readable types are I64$",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((96, 32), np.float32)}),
            r"lm_head\.weight has shape \(96, 32\); config.json asks for \(40, 32\)",
        ),
    ],
)
def test_wrong_tensors_are_named(folder, base, edit, message):
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=message):
        read_layout("eagle3", folder, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": ...}, "draft_vocab_size must be a whole number from 1 to vocab_size"),
        ({"draft_vocab_size": 41}, r"tensor d2t must have shape \(41,\), .*; found \(40,\)"),
        ({"hidden_size": 64}, "the head's hidden_size is 64, that of the base .* is 32; give the"),
        # Fields of vLLM and SGLang that no tensor shows.
        ({STATES: [0, 1, 2]}, r"layer_ids is \[0, 1, 2\]; only heads of the method's own states"),
        ({"eagle_config": {STATES: [2, 3, 5]}}, r"layer_ids is \[2, 3, 5\]; only heads of the me"),
        ({"norm_before_residual": True}, "norm_before_residual is True; only heads can be read th"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, base, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        read_layout("eagle3", folder, base)
