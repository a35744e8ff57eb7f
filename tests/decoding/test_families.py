"""Speculative text equals plain text on bases whose attention looks at the distance."""

import dataclasses

import jax
import numpy as np
import pytest

from clover_jax.config import RopeConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import TreeConfig, default_tree, parse_tree
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state, make_train_step
from tests.decoding.reference import plain_greedy
from tests.tiny_models import (
    DRAFTERS,
    SMALL_TREE,
    TINY,
    decode_all,
    random_base,
    random_head,
    random_prompts,
)
from tests.training.training_data import random_batch

# What Gemma 2 and 3 have, together; the last layer rotates otherwise than heads do, and its window
# is shorter than the prompts, and than some of the text that is drafted at once.
GEMMA = {
    "sliding_window": 3,
    "full_attention_layers": (0,),
    "query_key_norm": True,
    "local_rope": RopeConfig(theta=1e3),
    "score_scale": 0.3,
    "score_cap": 2.0,
    "logit_cap": 3.0,
    "post_norms": True,
    "activation": "gelu",
    "embedding_scale": 32**0.5,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "dense_layers": (0,)}
GPT_OSS = EXPERTS | {
    "sliding_window": 3,
    "full_attention_layers": (1,),
    "sinks": True,
    "expert_bias": True,
    "activation": "clamped",
    "qkv_bias": True,
    "output_bias": True,
}
FAMILIES = {
    "gemma": (GEMMA, SMALL_TREE),
    "experts": (EXPERTS, parse_tree("dynamic:5:3:2")),
    "sinks and biased experts": (GPT_OSS, SMALL_TREE),
    "alibi": ({"alibi": True}, parse_tree("dynamic:5:3:2")),
}
NEW_TOKENS = 24
PROMPTS = random_prompts(8, seed=3)


# What experts need is in the family with sinks too.
SLOW = ("experts",)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FAMILIES],
)
def test_speculative_text_equals_plain_text(family):
    changes, tree = FAMILIES[family]
    config = dataclasses.replace(TINY, num_layers=2, **changes)
    base, (head, draft_params) = random_base(config), random_head(config)
    plain = Engine(config, None, TreeConfig.root_only(), batch_size=4)
    texts = [row.output_ids for row in decode_all(plain, base, None, PROMPTS, NEW_TOKENS)]
    # The judge has no cache: it reads the whole text anew for every token.
    assert plain_greedy(config, base, PROMPTS[0], NEW_TOKENS) == texts[0]
    engine = Engine(config, head, tree, batch_size=4)
    rows = decode_all(engine, base, draft_params, PROMPTS, NEW_TOKENS)
    assert [row.output_ids for row in rows] == texts
    assert np.concatenate([row.accepted for row in rows]).max() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_trains_a_step_and_decodes_the_plain_text(family, name):
    changes, _ = FAMILIES[family]
    config = dataclasses.replace(TINY, num_layers=2, **changes)
    base, head = random_base(config), random_head(config, name)[0]
    train = TrainStepConfig(config, head, OptimizerConfig(10, 5e-3, 0))
    # Compiled, so that no param is the base's own buffer: the step consumes its state.
    state = jax.jit(init_state, static_argnums=(0, 2))(train, base, 0)
    state, metrics = make_train_step(train)(state, base, random_batch())
    assert np.isfinite(metrics.loss)

    texts = [plain_greedy(config, base, prompt, NEW_TOKENS) for prompt in PROMPTS[:2]]
    tree = parse_tree(default_tree(head.config.max_depth))
    rows = decode_all(
        Engine(config, head, tree, batch_size=2), base, state.params, PROMPTS[:2], NEW_TOKENS
    )
    assert [row.output_ids for row in rows] == texts
