"""Draft directories come back exactly; what is wrong is named; fingerprints of their bases."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.base import BaseFingerprint, checksum, differences, fingerprint
from clover_jax.checkpoints.card import save_params
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from tests.tiny_checkpoints import (
    assert_trees_equal,
    copy_of,
    edit_json,
    random_base,
    random_leaves,
)
from tests.tiny_folders import save_draft
from tests.tiny_models import TINY
from tests.tiny_models import random_base as random_params
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

PROVENANCE = {"flags": {"steps": 3}, "tau": 2.5}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return random_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def config(base):
    return registry.config_for_base("clover2", base.config, num_positions=3)


@pytest.fixture(scope="module")
def params(base, config):
    return random_leaves(registry.init_shapes(registry.head(config), base.params))


@pytest.fixture(scope="module")
def written(tmp_path_factory, base, config, params):
    """A draft directory as it was written."""
    directory = tmp_path_factory.mktemp("drafts") / "head"
    save_draft(directory, config, params, "paper25", fingerprint(base), PROVENANCE)
    return directory


@pytest.fixture
def folder(written, tmp_path):
    """A copy of it that a test may spoil."""
    return copy_of(written, tmp_path / "head")


def test_round_trip_is_exact(written, tmp_path, base, config, params):
    draft = load_draft(written, base)
    assert draft.head.config == config
    assert_trees_equal(draft.params, params)
    assert (draft.tree, draft.provenance, draft.source) == ("paper25", PROVENANCE, str(written))
    # The params are cast to the requested type, and are stored in any.
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_trees_equal(load_draft(written, base, jnp.bfloat16).params, narrow)
    save_draft(tmp_path / "head", config, narrow, None, fingerprint(base), {})
    assert_trees_equal(load_draft(tmp_path / "head", base, jnp.bfloat16).params, narrow)


def test_files_and_fields_that_are_not_read_are_named(folder, base, capsys):
    edit_json(folder / "draft.json", notes="mine", tau=3)
    (folder / "params" / ".DS_Store").write_bytes(b"x")
    load_draft(folder, base)
    assert capsys.readouterr().err == (
        f"{folder}/draft.json: 2 fields not read, unknown here: notes, tau\n"
        f"{folder}/params: 1 files not read, unknown to draft.json: .DS_Store\n"
    )


def test_saving_again_replaces_the_whole(folder, base, config, params):
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    save_draft(folder, config, other, "chain:3", fingerprint(base), {})
    draft = load_draft(folder, base)
    assert_trees_equal(draft.params, other)
    assert (draft.tree, draft.provenance) == ("chain:3", {})
    assert [path.name for path in folder.parent.iterdir()] == ["head"]


def test_a_failed_save_leaves_the_old_one(folder, base, config, params):
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_draft(folder, config, params, None, fingerprint(base), {"bad": object()})
    assert load_draft(folder, base).tree == "paper25"
    assert [path.name for path in folder.parent.iterdir()] == ["head"]


def test_a_workdir_gives_its_best_else_its_last(tmp_path, base, config, params):
    save_draft(tmp_path / "draft", config, params, "last", fingerprint(base), {})
    assert load_draft(tmp_path, base).tree == "last"
    save_draft(tmp_path / "best", config, params, "best", fingerprint(base), {})
    assert load_draft(tmp_path, base).tree == "best"


def test_another_base_is_refused_unless_allowed(written, base, tmp_path):
    other = random_base(tmp_path, seed=1)
    hashes = [fingerprint(model).lm_head[:12] for model in (base, other)]
    message = f"trained for another base than random: lm_head {hashes[0]} against {hashes[1]}; give"
    with pytest.raises(UserError, match=message):
        load_draft(written, other)
    assert load_draft(written, other, allow_base_mismatch=True).tree == "paper25"


def test_another_width_is_refused_even_if_a_mismatch_is_allowed(written, tmp_path):
    for name, ours, theirs in (("vocab_size", 96, 50), ("hidden_size", 32, 16)):
        config = dataclasses.replace(TINY, **{name: theirs}, head_dim=4)
        message = f"the head's {name} is {ours}, but the base random has {theirs}; give"
        with pytest.raises(UserError, match=message):
            load_draft(written, random_base(tmp_path, config), allow_base_mismatch=True)


def test_a_base_without_a_layer_that_is_read_is_refused_even_then(tmp_path, base):
    config = registry.config_for_base("clover_lr", base.config)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    save_draft(tmp_path / "head", config, params, None, fingerprint(base), {})
    other = random_base(tmp_path, dataclasses.replace(TINY, num_layers=2))
    with pytest.raises(UserError, match="reads the state that enters layer 2, but base .* has 2"):
        load_draft(tmp_path / "head", other, allow_base_mismatch=True)


def test_a_rotary_base_is_for_third_party_layouts_and_a_draft_has_a_card(written, tmp_path, base):
    with pytest.raises(UserError, match=r"stores its own RoPE theta; another one \(500000\)"):
        load_draft(written, base, rope_theta=5e5)
    with pytest.raises(UserError, match=r"is not a draft: it has neither draft\.json"):
        load_draft(tmp_path, base)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format_version": ...}, "has format_version None; this program reads 1"),
        ({"tree": 5}, "tree must be a string or null, not 5"),
        ({"provenance": {"flags": ["a"]}}, r"flags of provenance must be an object.*, not \['a'\]"),
        ({"provenance": {"flags": {"chat_template": [1]}}}, "chat_template of provenance's fl"),
        ({"base": "tiny"}, "has no 'base' object"),
        ({"drafter": {"kind": "clover2"}}, "missing 2 required keyword-only arguments: 'layer'"),
        ({"base": {"color": 1}}, "BaseFingerprint has no field 'color'; its fields are"),
    ],
)
def test_a_spoiled_card_is_named(folder, base, changes, message):
    edit_json(folder / "draft.json", **changes)
    with pytest.raises(UserError, match=message):
        load_draft(folder, base)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer": None}, r"draft\.json: layer must be an object, not None"),
        ({"features": "x"}, r"draft\.json: features must be a list, not 'x'"),
        ({"features": ["x"]}, r"draft\.json: features have 'x'; they are pre_norm, post_norm and"),
        ({"features": []}, r"json: no head can be built from its drafter \(.*\); was it edited"),
        ({"num_positions": 1.5}, r"draft\.json: num_positions must be a whole number, not 1.5"),
        ({"num_positions": 10**9}, r"num_positions \(1000000000\) must be at most 10000"),
        ({"max_depth": 0}, r"draft\.json: max_depth \(0\) must be at least 1"),
        ({"embedding_scale": True}, r"embedding_scale must be a number, not True"),
    ],
)
def test_a_config_of_the_wrong_types_is_named(folder, base, config, change, message):
    test_a_spoiled_card_is_named(folder, base, {"drafter": config.to_dict() | change}, message)


def test_every_lost_or_altered_file_of_the_params_is_named(written, tmp_path, base):
    names = list(json.loads((written / "draft.json").read_text())["files"])
    assert len(names) > 5
    for index, name in enumerate(names):
        folder = copy_of(written, tmp_path / f"head{index}")
        path = folder / "params" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{name} has changed since it was written"):
            load_draft(folder, base)
        path.unlink()
        with pytest.raises(UserError, match=f"{name} is missing; was the draft copied whole"):
            load_draft(folder, base)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.pop("projector_0"), "params lacks tensor projector_0, which its draft.json"),
        (lambda p: p.update(more={"scale": jnp.ones(3)}), "params has tensor more/scale, which it"),
        (lambda p: p.update(projector_0_bias=jnp.ones(31)),
         r"tensor projector_0_bias has shape \(31,\); draft.json asks for \(32,\)"),
        (lambda p: p.update(projector_0_bias=p["projector_0_bias"].at[3].set(jnp.nan)),
         "params: tensor projector_0_bias holds values that are not finite numbers"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(folder, base, params, edit, message):
    changed = dict(params)
    edit(changed)
    shutil.rmtree(folder / "params")
    edit_json(folder / "draft.json", files=save_params(folder / "params", changed))
    with pytest.raises(UserError, match=message):
        load_draft(folder, base)


def test_the_loaded_dtype_does_not_matter(fixtures_dir):
    source = str(fixtures_dir / "clover2_reference" / "base")
    narrow, wide = (fingerprint(load_base(source, dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow == wide
    assert (wide.vocab_size, wide.tokenizer, wide.chat_template) == (96, None, None)


def test_other_weights_and_shapes_differ(tmp_path):
    one, other = (fingerprint(random_base(tmp_path, seed=seed)) for seed in (0, 1))
    assert differences(one, one) == {}
    assert BaseFingerprint.from_dict(one.to_dict()) == one
    assert differences(one, other) == {"lm_head": (one.lm_head, other.lm_head)}
    deeper = random_base(tmp_path, dataclasses.replace(TINY, num_layers=4))
    assert differences(one, fingerprint(deeper))["num_layers"] == (3, 4)


def test_tied_embeddings_are_their_own_output_matrix(tmp_path):
    base = random_base(tmp_path, dataclasses.replace(TINY, tie_word_embeddings=True))
    untied = dataclasses.replace(base, params=base.params | {"lm_head": base.params["embedding"]})
    assert fingerprint(base) == fingerprint(untied)


def test_the_tokenizer_and_its_template_count_where_both_sides_have_them(tmp_path):
    base = random_base(tmp_path)
    bare = fingerprint(base)
    save_byte_level(tmp_path)
    plain = fingerprint(base)
    save_byte_level(tmp_path, CHAT_TEMPLATE)
    chatty = fingerprint(base)
    assert plain.tokenizer == chatty.tokenizer is not None
    assert plain.chat_template is None
    assert chatty.chat_template is not None
    assert differences(plain, chatty) == {}
    assert differences(bare, plain) == {}, "a folder without a tokenizer may be the same base"
    save_byte_level(tmp_path, CHAT_TEMPLATE + " ")
    edited = fingerprint(base)
    hashes = (chatty.chat_template, edited.chat_template)
    assert differences(chatty, edited) == {"chat_template": hashes}
    other = dataclasses.replace(plain, tokenizer="other")
    assert differences(plain, other) == {"tokenizer": (plain.tokenizer, "other")}


def test_a_checksum_tells_any_change_and_any_exchange():
    params = random_params(TINY)
    known = checksum(params)
    assert checksum(jax.tree.map(lambda x: x + 0, params)) == known
    up = params["layers_1"]["mlp"]["down"]
    exchanged = up.at[jnp.array([0, 7])].set(up[jnp.array([7, 0])])
    others = up.at[3, 5].add(1e-3), 2 * up, up[::-1], up[:, ::-1], up.astype(jnp.bfloat16)
    for other in (*others, exchanged):
        layer = params["layers_1"] | {"mlp": params["layers_1"]["mlp"] | {"down": other}}
        assert checksum(params | {"layers_1": layer}) != known
