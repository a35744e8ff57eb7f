"""Which models and which tree the flags stand for, and when they are the same."""

import dataclasses

import jax
import pytest

from clover_jax.config import RopeConfig
from clover_jax.decoding.models import identity_of, load_shapes, params_hash, tree_notice
from clover_jax.decoding.models import load as load_spec
from clover_jax.decoding.spec import ModelSpec
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import DRAFT_ROWS
from clover_jax.errors import UserError
from tests.tiny_checkpoints import edit_json
from tests.tiny_folders import save_tiny_draft


def load(base, draft="none", tree=None):
    return load_spec(ModelSpec(str(base), draft=str(draft), tree=tree, dtype="float32"))


def test_the_tree_is_what_is_asked_else_the_draft_s_else_paper25(base, tmp_path):
    with_tree = save_tiny_draft(tmp_path / "a", base, tree="chain:2")
    without = save_tiny_draft(tmp_path / "b", base, tree=None)
    assert load(base, with_tree).tree.name == "chain:2"
    assert load(base, with_tree, "chain:4").tree.name == "chain:4"
    assert load(base, without).tree.name == "paper25"
    assert load(base).tree.num_nodes == 0
    assert load(base, tree="none").tree.num_nodes == 0
    with pytest.raises(UserError, match="'chain:2' has 2 nodes and there is no draft to fill them"):
        load(base, tree="chain:2")


def test_a_large_tree_that_nobody_named_is_told_on_a_cpu(base, tmp_path):
    draft = save_tiny_draft(tmp_path / "a", base, tree=None)
    for tree, told in ((None, True), ("paper25", False), ("auto", False)):
        spec = ModelSpec(str(base), draft=str(draft), tree=tree)
        assert bool(tree_notice(spec, load(base, draft))) == told
    assert tree_notice(ModelSpec(str(base)), load(base)) is None


def test_a_random_head_takes_options_of_its_kind():
    def models_of(draft):
        return load_shapes(ModelSpec("shape:64x3x96", draft=draft, dtype="float32"))

    def config_of(draft):
        return models_of(draft).head.config

    options = "num_layers=2,candidates=8"
    assert config_of("random:dflash2").num_layers == 3
    with_options = config_of(f"random:dflash2:{options}")
    assert (with_options.num_layers, with_options.candidates) == (2, 8)
    reduced = models_of("random:clover_lr:rank=8,draft_vocab=32")
    assert reduced.weights.base[DRAFT_ROWS].shape == (reduced.head.config.draft_vocab_size, 64)
    assert reduced.head.config.draft_vocab_size == 32
    with pytest.raises(UserError, match="draft_to_target .97 ids. must ascend and lie in 0 .. 95"):
        config_of("random:clover_lr:draft_vocab=97")
    with pytest.raises(UserError, match="--draft=random:clover_lr:depth=2: .* no option 'depth'"):
        config_of("random:clover_lr:depth=2")
    with pytest.raises(UserError, match=r"--draft=random:clover_lr:rank=-1: rank \(-1\) must lie"):
        config_of("random:clover_lr:rank=-1")


def test_a_draft_decodes_with_the_chat_template_of_its_training_only(base, tmp_path):
    draft = save_tiny_draft(tmp_path / "a", base)
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}\n")

    usual = ModelSpec(str(base), dtype="float32")
    plain = {
        name: load_spec(dataclasses.replace(usual, chat_template=name))
        for name in (None, "vicuna", str(template))
    }

    def decode(name=None, **options):
        return load_spec(ModelSpec(draft=str(draft), **options), plain[name])

    def trained(text, flag="vicuna"):
        flags = {"flags": {"chat_template": flag}}
        edit_json(draft / "draft.json", chat_template=text, provenance=flags)

    own = decode(str(template))  # nothing is known of the draft's
    assert own.tokenizer.chat_template == "{{ messages }}"
    assert changed(decode(), own) == {"chat_template"}
    trained(plain["vicuna"].tokenizer.chat_template + "\n")
    assert decode("vicuna").draft is not None
    assert decode(allow_base_mismatch=True).draft is not None
    message = "another chat template than the one in use: --chat_template=vicuna; decode with that"
    for name in (None, str(template)):
        with pytest.raises(UserError, match=message):
            decode(name)
    trained("{{ other }}", flag=None)
    with pytest.raises(UserError, match="the one in use: the base's own; decode with that"):
        decode("vicuna")
    trained(...)  # a draft of before the text was recorded
    assert decode("vicuna").draft is not None
    with pytest.raises(UserError, match=message):
        decode()
    edit_json(draft / "draft.json", chat_template=[1])
    with pytest.raises(UserError, match=r"chat_template must be a string or null, not \[1\]"):
        decode("vicuna")


def test_another_draft_is_another_identity(base, tmp_path):
    models = load(base, save_tiny_draft(tmp_path / "a", base))
    assert identity_of(models) == identity_of(load(base, tmp_path / "a"))
    assert identity_of(models)["draft_hash"] == params_hash(models.draft_params)
    other = jax.tree.map(lambda leaf: leaf + 1, models.draft_params)
    assert params_hash(other) != params_hash(models.draft_params)
    assert identity_of(load(base))["draft_hash"] is None


def changed(before, after):
    """Return the parts of the identity that a change makes different."""
    one, other = identity_of(before), identity_of(after)
    return {name for name in one if one[name] != other[name]}


def test_whatever_changes_the_rows_is_part_of_the_identity(base, tmp_path):
    models = load(base, save_tiny_draft(tmp_path / "a", base))

    layer = models.base.params["layers_0"]
    mlp = layer["mlp"] | {"down": 2 * layer["mlp"]["down"]}
    params = models.base.params | {"layers_0": layer | {"mlp": mlp}}
    finetuned = dataclasses.replace(models.base, params=params)  # its lm_head as before
    longer = dataclasses.replace(models.base.config, max_position_embeddings=99)
    own = models.draft.head.config
    layer = dataclasses.replace(own.layer, rope=RopeConfig(theta=5e5))
    turned = dataclasses.replace(own, layer=layer)
    others = {
        "base_params": {"base": finetuned},
        "base_config": {"base": dataclasses.replace(models.base, config=longer)},
        "draft_config": {"draft": dataclasses.replace(models.draft, head=registry.head(turned))},
    }
    for name, values in others.items():
        assert changed(models, dataclasses.replace(models, **values)) == {name}
