"""The layout of DFlash and DFlash 2 heads: writing reverses reading, and errors name things."""

import dataclasses
import json

import pytest

from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.interchange.directory import load_draft
from clover_jax.interchange.layouts import recognise
from clover_jax.pretrained.loading import load_base
from tests.foreign_heads import read_layout, write_layout
from tests.tiny_checkpoints import (
    assert_same_tensors,
    assert_trees_equal,
    copy_of,
    edit_json,
    random_base,
    random_leaves,
)
from tests.tiny_models import TINY


@pytest.fixture(scope="module")
def reference_dir(fixtures_dir):
    return fixtures_dir / "dflash2_reference"


@pytest.fixture(scope="module")
def base(reference_dir):
    return load_base(str(reference_dir / "base"))


def test_reading_and_writing_gives_the_same_tensors(reference_dir, tmp_path, base):
    assert recognise(reference_dir / "dflash2").name == "dflash2"
    config, params = read_layout("dflash2", reference_dir / "dflash2", base)
    write_layout("dflash2", tmp_path / "written", config, params, base)
    assert_same_tensors(reference_dir / "dflash2", tmp_path / "written")
    one, other = (
        json.loads((folder / "config.json").read_text())
        for folder in (reference_dir / "dflash2", tmp_path / "written")
    )
    assert {name: other.get(name) for name in one} == one


@pytest.mark.parametrize("options", [{}, {"rank": 0, "conv_taps": 0}], ids=["dflash2", "dflash"])
def test_writing_and_reading_gives_the_same_head(tmp_path, options):
    changes = {"num_layers": 8, "rope": RopeConfig(5e5, "llama3", 8.0), "qkv_bias": True}
    base = random_base(tmp_path, dataclasses.replace(TINY, **changes))
    config = registry.config_for_base("dflash2", base.config, num_layers=2, **options)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    write_layout("dflash2", tmp_path / "head", config, params, base)
    found_config, found_params = read_layout("dflash2", tmp_path / "head", base)
    assert found_config == config
    assert_trees_equal(found_params, params)
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert fields["architectures"] == [f"DFlash{'' if options else '2'}DraftModel"]


OWN = [  # changes of dflash_config
    ({"causal": True, "markov_rank": 4}, "dflash_config has causal, markov_rank, which no DFlash"),
    ({"target_layer_ids": [1, 8]}, r"layers of the base, 0 to 7, not \[1, 8\]"),
    ({"target_layer_ids": [1, 3]}, r"fc\.weight has shape \(32, 96\); config.json asks for"),
    ({"mask_token_id": None}, "mask_token_id must be a whole number, not None"),
    ({"mask_token_id": 96}, r"mask_token_id \(96\) must lie in 0 .. 95"),
    ({"block_size": 0}, "block_size must be a positive whole number, not 0"),
    ({"conv_group_size": 5}, r"conv_group \(5\) divide hidden_size \(32\)"),
]
BESIDE = [
    ({"dflash_config": []}, r"dflash_config must be an object, not \[\]"),
    ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\]; only full"),
    (
        {"layer_types": None, "use_sliding_window": True, "max_window_layers": 0},
        "use_sliding_window gives layers of the head a window",
    ),
]


@pytest.mark.parametrize(("changes", "message"), OWN + BESIDE)
def test_what_cannot_be_read_is_named(reference_dir, tmp_path, base, changes, message):
    folder = copy_of(reference_dir / "dflash2", tmp_path / "dflash2")
    if (changes, message) in OWN:
        fields = json.loads((folder / "config.json").read_text())["dflash_config"]
        changes = {"dflash_config": fields | changes}
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        load_draft(folder, base)


@pytest.mark.parametrize(
    ("rope", "changes", "message"),
    [
        (None, {"draft_to_target": (0, 5)}, "over 2 of the base's 96 tokens"),
        (None, {"features": ("layer_0", "pre_norm")}, "reads layer_0 of its base"),
        (RopeConfig(share=0.5), {}, "this head has a rotation of Phi's kind"),
    ],
)
def test_what_readers_would_run_differently_is_not_written(tmp_path, rope, changes, message):
    base = random_base(tmp_path)
    config = registry.config_for_base("dflash2", base.config, rope=rope)
    config = dataclasses.replace(config, **changes)
    with pytest.raises(UserError, match=message):
        write_layout("dflash2", tmp_path / "head", config, {}, base)
    assert not (tmp_path / "head").exists()
