"""Which models and which tree the flags stand for, and when they are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.generation.models import load_models, params_hash
from tests.tiny_folders import save_tiny_base, save_tiny_draft


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


def load(base, draft="none", tree=None):
    return load_models(str(base), str(draft), tree, jnp.float32)


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


def test_another_draft_is_another_identity(base, tmp_path):
    models = load(base, save_tiny_draft(tmp_path / "a", base))
    assert models.identity() == load(base, tmp_path / "a").identity()
    assert models.identity()["draft_hash"] == params_hash(models.draft_params)
    other = jax.tree.map(lambda leaf: leaf + 1, models.draft_params)
    assert params_hash(other) != params_hash(models.draft_params)
    assert load(base).identity()["draft_hash"] is None


def changed(before, after):
    """Return the parts of the identity that a change makes different."""
    one, other = before.identity(), after.identity()
    return {name for name in one if one[name] != other[name]}


def test_whatever_changes_the_rows_is_part_of_the_identity(base, tmp_path):
    models = load(base, save_tiny_draft(tmp_path / "a", base))

    layer = models.base.params["layers_0"]
    mlp = layer["mlp"] | {"down": 2 * layer["mlp"]["down"]}
    params = models.base.params | {"layers_0": layer | {"mlp": mlp}}
    finetuned = dataclasses.replace(models.base, params=params)  # its lm_head as before
    longer = dataclasses.replace(models.base.config, max_position_embeddings=99)
    head = models.draft.head
    turned = dataclasses.replace(
        head.config, layer=dataclasses.replace(head.config.layer, rope=RopeConfig(theta=5e5))
    )
    others = {
        "base_params": {"base": finetuned},
        "base_config": {"base": dataclasses.replace(models.base, config=longer)},
        "draft_config": {"draft": dataclasses.replace(models.draft, head=registry.head(turned))},
    }
    for name, values in others.items():
        assert changed(models, dataclasses.replace(models, **values)) == {name}
