"""Speculative text equals plain text on bases whose attention looks at the distance."""

import dataclasses

import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.reference import plain_greedy
from clover_jax.decoding.tree import TreeConfig, parse_tree
from tests.tiny_models import SMALL_TREE, TINY, random_base, random_head, random_prompts

FAMILIES = {
    # Shorter than the prompts, and than some of the text that is drafted at once.
    "windows and head norms": (
        {"sliding_window": 3, "full_attention_layers": (1,), "query_key_norm": True},
        SMALL_TREE,
    ),
    "alibi": ({"alibi": True}, parse_tree("dynamic:5:3:2")),
}
NEW_TOKENS = 24
PROMPTS = random_prompts(8, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_text_equals_plain_text(family):
    changes, tree = FAMILIES[family]
    config = dataclasses.replace(TINY, num_layers=2, **changes)
    base, (head, draft_params) = random_base(config), random_head(config)
    plain = Engine(config, None, TreeConfig.root_only(), batch_size=4)
    texts = [row.output_ids for row in plain.generate(base, None, PROMPTS, NEW_TOKENS)]
    # The judge has no cache: it reads the whole text anew for every token.
    assert plain_greedy(config, base, PROMPTS[0], NEW_TOKENS) == texts[0]
    engine = Engine(config, head, tree, batch_size=4)
    rows = engine.generate(base, draft_params, PROMPTS, NEW_TOKENS)
    assert [row.output_ids for row in rows] == texts
    assert np.concatenate([row.accepted for row in rows]).max() >= 2
