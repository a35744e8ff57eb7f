"""Which models and which tree the flags stand for, and when they are the same."""

import jax
import jax.numpy as jnp
import pytest

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
