"""Bases whose attention is wider than they are, such as Qwen3-0.6B."""

import dataclasses

import jax
import numpy as np
import pytest

from clover_jax.checkpoints.clover2 import check_exportable
from clover_jax.drafters import registry
from clover_jax.drafters.attention_decoder import split_width
from clover_jax.errors import UserError
from tests.tiny_models import TINY, init_head, random_base

# 8 heads of 8 over a width of 32.
WIDE = dataclasses.replace(TINY, num_heads=8, num_kv_heads=4)


@pytest.mark.parametrize("kind", ["clover", "clover2"])
def test_a_head_splits_the_width_in_heads_of_the_bases_size(kind):
    head = registry.head(registry.config_for_base(kind, WIDE))
    assert split_width(head.config.layer) == (4, 8)
    params = init_head(head, random_base(WIDE), jax.random.key(0))
    queries = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jax.tree_util.keystr(path).endswith("['query']")
    ]
    assert queries
    for query in queries:
        # The method's start: identity, and a little noise.
        np.testing.assert_allclose(query.reshape(32, 32), np.eye(32), atol=0.06)


def test_a_width_that_heads_do_not_fill_is_refused():
    odd = dataclasses.replace(TINY, hidden_size=36, head_dim=8)
    config = registry.config_for_base("clover2", odd)
    assert config.decoder_heads == 4
    with pytest.raises(ValueError, match=r"head_dim \(8\) does not divide: set decoder_heads.* 4"):
        dataclasses.replace(config, decoder_heads=0)


def test_the_official_layout_cannot_hold_such_a_head():
    config = registry.config_for_base("clover2", WIDE)
    with pytest.raises(UserError, match=r"width \(32\) in num_heads \(8\) parts, which is not"):
        check_exportable(config, WIDE)
