"""Third-party layouts: writing reverses reading, and errors name the part that is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.checkpoints.clover2 import COPIES
from clover_jax.checkpoints.layouts import recognize
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import LossSpec, RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
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

# The fixture of each layout, and the folder of its head there.
REFERENCES = {name: (f"{name}_reference", name) for name in ("clover2", "eagle3", "dflash2")}
REFERENCES["eagle"] = ("clover2_reference", "eagle1")
STATES = "eagle_aux_hidden_state_layer_ids"
layouts = pytest.mark.parametrize("layout", REFERENCES)


@pytest.fixture(scope="module")
def references(fixtures_dir):
    """The base and the head of each layout."""
    loaded = {}
    for layout, (fixture, name) in REFERENCES.items():
        folder = fixtures_dir / fixture
        loaded[layout] = load_base(str(folder / "base")), folder / name
    return loaded


@pytest.fixture
def spoilt(references, tmp_path):
    """Return a function from a layout to its base and a copy of its head that a test may spoil."""

    def copy(layout):
        base, head = references[layout]
        return base, copy_of(head, tmp_path / "head")

    return copy


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


COMPARED = ("vocab_size", "num_hidden_layers", "rope_theta")
FIELDS = {
    "clover2": (*COMPARED, "clover", "hidden_size", "num_key_value_heads"),
    "eagle": (*COMPARED, "architectures", "bias"),
    "eagle3": (*COMPARED, "architectures", "draft_vocab_size"),
}


@layouts
def test_reading_and_writing_gives_the_same_tensors(references, tmp_path, layout):
    base, head = references[layout]
    assert recognize(head).name == layout
    config, params = read_layout(layout, head, base)
    write_layout(layout, tmp_path / "written", config, params, base)
    assert_same_tensors(head, tmp_path / "written")
    one, other = fields_of(head), fields_of(tmp_path / "written")
    compared = FIELDS.get(layout, one)
    assert {name: other.get(name) for name in compared} == {name: one[name] for name in compared}


BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
LLAMA3 = {"rope": RopeConfig(5e5, "llama3", 8.0)}
DEEP = LLAMA3 | {"num_layers": 8, "qkv_bias": True}
TIED = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
LINEAR = {"rope": RopeConfig(1e4, "linear", 2.0)}
# The layout of Clover-2 holds the weights of the release's loss; the others hold no loss.
RELEASE = {"loss": LossSpec(regression=5.0, soft_ce=0.5, decay=0.7)}
# Changes of the base, options of the head, changes of its config; the first word is its kind.
HEADS = {
    "clover2 of 1": ({}, {"num_positions": 1, "num_augmenting_layers": 1}, RELEASE),
    "clover2 of 3": (
        {"num_kv_heads": 4},
        {"num_positions": 3, "num_augmenting_layers": 3},
        RELEASE,
    ),
    "clover2 with biases": (BIASES, {}, RELEASE),
    "clover2 tied": (TIED, {}, RELEASE),
    "eagle tied": (TIED, {}, {}),
    "eagle with biases": (BIASES | {"rope": RopeConfig(theta=5e5)}, {}, {"fc_bias": False}),
    "eagle llama3": (LLAMA3 | {"num_kv_heads": 4}, {}, {"fc_bias": True}),
    "eagle linear": (LINEAR | {"output_bias": True}, {}, {"fc_bias": True}),
    "eagle3": (DEEP, {}, {}),
    "eagle3 of 4 tokens": (DEEP, {}, {"draft_to_target": (0, 5, 6, 95)}),
    "dflash2": (DEEP, {"num_layers": 2}, {}),
    "dflash2 without its own": (DEEP, {"num_layers": 2, "rank": 0, "conv_taps": 0}, {}),
}


@pytest.mark.parametrize("case", HEADS)
def test_writing_and_reading_gives_the_same_head(tmp_path, case):
    kind, (of_base, options, changes) = case.split()[0], HEADS[case]
    base = random_base(tmp_path, dataclasses.replace(TINY, **of_base))
    config = registry.config_for_base(kind, base.config, **options)
    config = dataclasses.replace(config, **changes)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    write_layout(kind, tmp_path / "head", config, params, base)
    found_config, found_params = read_layout(kind, tmp_path / "head", base)
    assert found_config == config
    assert_trees_equal(found_params, params)
    if kind == "dflash2":
        name = "DFlash2DraftModel" if case == kind else "DFlashDraftModel"
        assert fields_of(tmp_path / "head")["architectures"] == [name]


@pytest.mark.parametrize(
    ("layout", "of_the_file", "without"),
    [("clover2", 1e4, 1e4), ("eagle", 5e5, 1e4), ("eagle3", 5e5, 1e4)],
)
def test_the_rotary_base_is_the_file_s_where_readers_use_it(spoilt, layout, of_the_file, without):
    base, folder = spoilt(layout)

    def rope(**options):
        return load_draft(folder, base, **options).head.config.layer.rope

    edit_json(folder / "config.json", rope_theta=5e5)
    assert rope() == RopeConfig(theta=of_the_file)
    edit_json(folder / "config.json", rope_theta=...)
    assert rope() == RopeConfig(theta=without)
    assert rope(rope_theta=2e5) == RopeConfig(theta=2e5)


def test_a_bfloat16_file_fits_a_float32_base(spoilt):
    base, folder = spoilt("clover2")
    edit_tensors(
        folder, lambda t: t.update({name: x.astype(ml_dtypes.bfloat16) for name, x in t.items()})
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        assert read_layout("clover2", folder, base, dtype)[1]["projector_0"].dtype == dtype


@pytest.mark.parametrize(
    ("layout", "name", "which"),
    [
        *(("clover2", name, "output matrix") for name in COPIES),
        ("eagle", "embed_tokens.weight", "input embedding"),
    ],
)
def test_a_copy_of_another_base_s_matrix_is_refused(spoilt, layout, name, which):
    base, folder = spoilt(layout)

    edit_tensors(folder, lambda tensors: tensors[name].__setitem__((7, 3), tensors[name][7, 3] + 1))
    message = rf"{name} differs from the {which} of the base .*base \(first in row 7\); give"
    with pytest.raises(UserError, match=message):
        read_layout(layout, folder, base)
    read_layout(layout, folder, base, allow_base_mismatch=True)


@pytest.mark.parametrize(("entered", "left"), [([2, 4, 5], [1, 3, 4]), ([], [])])
def test_an_eagle3_config_may_name_the_method_s_own_states(spoilt, entered, left):
    # Fields of vLLM and SGLang.
    base, folder = spoilt("eagle3")
    edit_json(folder / "config.json", **{STATES: entered}, norm_before_residual=False)
    edit_json(folder / "config.json", eagle_config={STATES: left})
    assert load_draft(folder, base).head.config.draft_vocab_size == 40


@pytest.mark.parity
def test_a_published_head_s_pytorch_file_is_read_with_its_tables(spoilt):
    torch = pytest.importorskip("torch")
    base, folder = spoilt("eagle3")
    tensors = load_file(folder / "model.safetensors")
    wanted = read_layout("eagle3", folder, base)
    (folder / "model.safetensors").unlink()
    torch.save({k: torch.tensor(v) for k, v in tensors.items()}, folder / "pytorch_model.bin")
    found = read_layout("eagle3", folder, base)
    assert found[0] == wanted[0]
    assert_trees_equal(found[1], wanted[1])


def test_an_eagle3_head_over_the_whole_vocabulary_needs_no_tables(tmp_path):
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


# What a Clover-2 head lacks is in tests/convert/corrupt_heads.py.
TENSORS = [
    ("eagle", lambda t: t.pop("fc.bias"), r"lacks tensor fc\.bias, which its config.json asks"),
    ("eagle", lambda t: t.update(extra=np.ones(3, np.float32)), "has tensor extra, which its conf"),
    ("eagle", lambda t: t.update({"fc.weight": t["fc.weight"][:, :32].copy()}),
     r"fc\.weight has shape \(32, 32\); config.json asks for \(32, 64\)"),
    ("eagle", lambda t: t["fc.weight"].fill(np.inf), r"tensor fc\.weight holds values that are n"),
    ("eagle3", lambda t: t.pop("norm.weight"), r"lacks tensor norm\.weight, which its config.json"),
    ("eagle3", lambda t: t.update(extra=np.ones(3, np.float32)), "has tensor extra, which its con"),
    ("eagle3", lambda t: t.pop("d2t"), r"tensor d2t must have shape \(40,\), .*; found none"),
    ("eagle3", lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d disagree: draft ids"),
    ("eagle3", lambda t: t.update(d2t=t["d2t"].astype(np.float32)),
     "tensor d2t is stored as F32; the readable types are I64$"),
    ("eagle3", lambda t: t.update({"lm_head.weight": np.ones((96, 32), np.float32)}),
     r"lm_head\.weight has shape \(96, 32\); config.json asks for \(40, 32\)"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "edit", "message"), TENSORS)
def test_wrong_tensors_are_named(spoilt, layout, edit, message):
    base, folder = spoilt(layout)
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=message):
        load_draft(folder, base)


def own(**changes):
    """Return changes of the object `dflash_config`."""
    return lambda fields: {"dflash_config": fields["dflash_config"] | changes}


CONFIGS = [
    ("clover2", {"clover": ...}, 'an official Clover-2 head without the "clover" object in its c'),
    ("clover2", {"clover": 5}, 'has no "clover" object; it is not an official Clover-2 head'),
    ("clover2", {"clover": {"num_heads": 5}}, "clover.num_layers must be a positive whole number,"),
    ("clover2", {"vocab_size": 95}, "head's vocab_size is 95, but the base .* has 96; give the"),
    ("clover2", {"head_dim": 16}, r"splits the width \(32\) in num_heads \(4\) parts, .* \(16\)"),
    ("eagle", {"bias": False}, r"has tensor fc\.bias, which its config.json does not ask for"),
    ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE head has 1"),
    ("eagle", {"vocab_size": 95}, "the head's vocab_size is 95, but the base .* has 96; give the"),
    ("eagle3", {"draft_vocab_size": ...}, "draft_vocab_size must be a whole number from 1 to voca"),
    ("eagle3", {"draft_vocab_size": 41}, r"tensor d2t must have shape \(41,\), .*; found \(40,\)"),
    ("eagle3", {"hidden_size": 64}, "the head's hidden_size is 64, but the base .* has 32; give"),
    ("eagle3", {"quantization_config": {"bits": 4}}, "a quantized draft head cannot be read; u"),
    # Fields of vLLM and SGLang that no tensor shows.
    ("eagle3", {STATES: [0, 1, 2]}, r"layer_ids is \[0, 1, 2\]; only heads of the method's own"),
    ("eagle3", {"eagle_config": {STATES: [2, 3, 5]}}, r"layer_ids is \[2, 3, 5\]; only heads of"),
    ("eagle3", {"norm_before_residual": True}, "norm_before_residual is True, and must be Fa"),
    ("eagle3", {"norm_output": True}, "norm_output is True, and must be False"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}},
     "hidden_state is False, and must"),
    ("dflash2", {"num_target_layers": 9}, "num_target_layers is 9, but the base has 8 layers; gi"),
    ("dflash2", own(causal=True, markov_rank=4), "DFlash 2 head: causal, markov_rank"),
    ("dflash2", own(target_layer_ids=[1, 8]), r"layers of the base, 0 to 7, not \[1, 8\]"),
    ("dflash2", own(target_layer_ids=[1, 3]), r"fc\.weight has shape \(32, 96\); config.json asks"),
    ("dflash2", own(mask_token_id=None), "mask_token_id must be a whole number, not None"),
    ("dflash2", own(mask_token_id=96), r"mask_token_id \(96\) must lie in 0 .. 95"),
    ("dflash2", own(block_size=0), "block_size must be a positive whole number, not 0"),
    ("dflash2", own(conv_group_size=5), r"conv_group \(5\) divide hidden_size \(32\)"),
    ("dflash2", {"dflash_config": []}, r"dflash_config must be an object, not \[\]"),
    ("dflash2", {"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\];"),
    ("dflash2", {"layer_types": None, "use_sliding_window": True, "max_window_layers": 0},
     "use_sliding_window gives layers of the head a window"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes", "message"), CONFIGS)
def test_a_config_that_does_not_fit_is_refused(spoilt, layout, changes, message):
    base, folder = spoilt(layout)
    if callable(changes):
        changes = changes(fields_of(folder))
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        load_draft(folder, base)


ROTATION = (
    r"rotates with base {:.0f} \(type {}\), but readers of the official Clover-2 layout always use "
    r"10000 .*; train the head with --draft_rope_theta=10000"
)
# Changes of the config, of its layer, and the message.
NOT_WRITTEN = [
    ("clover2", {}, {"rope": RopeConfig(theta=5e5)}, ROTATION.format(5e5, "default")),
    ("clover2", {}, LINEAR, ROTATION.format(1e4, "linear")),
    ("clover2", {}, {"alibi": True}, "this head has ALiBi, as its base has, but the official Clov"),
    ("clover2", {}, {"query_key_norm": True}, "this head has query and key norms, as its base has"),
    ("clover2", {}, {"post_norms": True}, "this head has norms after attention and MLP, as its ba"),
    ("clover2", {}, {"sinks": True}, "this head has attention sinks, as its base has, but"),
    ("clover2", {}, {"qkv_bias": True}, "has qkv_bias True and output_bias False"),
    ("clover2", {"order": "block_first"}, {}, "official Clover-2 layout holds heads with 'decoder"),
    ("clover2", {"output_projector": False}, {}, "official Clover-2 layout holds heads with 'deco"),
    ("eagle3", {}, {}, r"reads layer_1, layer_1, pre_norm, but readers of the"),
    ("dflash2", {"draft_to_target": (0, 5)}, {}, "over 2 of the base's 96 tokens"),
    ("dflash2", {"features": ("layer_0", "pre_norm")}, {}, "reads layer_0 of its base"),
    ("dflash2", {}, {"rope": RopeConfig(share=0.5)}, "this head has a rotation of Phi's"),
]


@pytest.mark.parametrize(("kind", "changes", "of_layer", "message"), NOT_WRITTEN)
def test_what_readers_run_differently_is_not_written(tmp_path, kind, changes, of_layer, message):
    base = random_base(tmp_path)
    config = registry.config_for_base(kind, base.config)
    layer = dataclasses.replace(config.layer, **of_layer)
    config = dataclasses.replace(config, layer=layer, **changes)
    with pytest.raises(UserError, match=message):
        write_layout(kind, tmp_path / "head", config, {}, base)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("clover_head_mlp.weight", 'Clover-2 head without the "clover" object in its config'),
        ("wte.weight", "in no known draft layout: .*its first tensor is wte.weight"),
        ("model.embed_tokens.weight", "is a base model, which cannot be read as a draft; native d"),
    ],
)
def test_a_folder_of_no_known_layout_is_described(tmp_path, tensor, message):
    (tmp_path / "config.json").write_text("{}")
    save_file({tensor: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        recognize(tmp_path)
