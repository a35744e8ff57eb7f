"""Layouts of drafts are told apart; what cannot be read is called by its name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax.errors import UserError
from clover_jax.interchange.directory import load_draft
from clover_jax.interchange.layouts import recognise
from clover_jax.pretrained.loading import load_base


def test_clover2_is_recognised_and_loads_as_a_draft(fixtures_dir):
    reference = fixtures_dir / "clover2_reference"
    base = load_base(str(reference / "base"))
    assert recognise(reference / "clover2").name == "clover2"
    draft = load_draft(reference / "clover2", base, rope_theta=5e5)
    assert draft.provenance == {"layout": "clover2"}
    assert draft.tree is None
    assert draft.head.config.layer.rope.theta == 5e5


def test_eagle_is_recognised_and_loads_as_a_draft(fixtures_dir):
    reference = fixtures_dir / "clover2_reference"
    base = load_base(str(reference / "base"))
    assert recognise(reference / "eagle1").name == "eagle"
    draft = load_draft(reference / "eagle1", base, rope_theta=5e5)
    assert draft.provenance == {"layout": "eagle"}
    assert draft.head.config.kind == "eagle"
    assert draft.head.config.layer.rope.theta == 5e5


def test_a_base_is_no_draft(fixtures_dir):
    message = "base is a base model, which cannot be read as a draft; native draft folders and"
    with pytest.raises(UserError, match=message):
        recognise(fixtures_dir / "clover2_reference" / "base")


@pytest.mark.parametrize(
    "config, tensor, message",
    [
        ({}, "clover_head_mlp.weight", 'Clover-2 head without the "clover" object in its config'),
        ({}, "wte.weight", "in no known draft layout: .*its first tensor is wte.weight"),
    ],
)
def test_what_cannot_be_read_is_called_by_its_name(tmp_path, config, tensor, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({tensor: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        recognise(tmp_path)
