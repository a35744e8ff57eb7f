"""Speculative decoding writes what plain decoding writes, token for token, on every family."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from clover_jax.config import DeltaConfig, RopeConfig
from clover_jax.decoding.tree_config import TreeConfig, default_tree, parse_tree
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state, make_train_step
from tests.decoding.reference import plain_greedy, speculative_greedy
from tests.tiny_models import (
    DRAFTERS,
    SMALL_TREE,
    TINY,
    decoded,
    lively_params,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)
from tests.training.training_data import random_batch

# What Gemma 2 and 3 have, together; the last layer rotates otherwise than heads do, and its window
# is shorter than the prompts, and than some of the text that is drafted at once.
GEMMA = {"sliding_window": 3, "full_attention_layers": (0,), "local_rope": RopeConfig(theta=1e3)}
GEMMA |= {"score_scale": 0.3, "score_cap": 2.0, "logit_cap": 3.0, "embedding_scale": 32**0.5}
GEMMA |= {"activation": "gelu", "post_norms": True, "query_key_norm": True}
GEMMA |= {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "dense_layers": (0,)}
GPT_OSS = EXPERTS | {"sliding_window": 3, "full_attention_layers": (1,), "activation": "clamped"}
GPT_OSS |= dict.fromkeys(("sinks", "expert_bias", "qkv_bias", "output_bias"), True)
# Below, heads that are narrower and more; experts next to the MLP.
GEMMA4 = GEMMA | EXPERTS | {"num_kv_heads": 1, "head_dim": 16, "dense_layers": ()}
GEMMA4 |= {"local_kv_heads": 2, "local_head_dim": 8, "full_attention_layers": (1,)}
GEMMA4 |= {"rope": RopeConfig(kind="proportional", share=0.25), "score_cap": None}
GEMMA4 |= dict.fromkeys(("value_norm", "keys_as_values", "scaled_output", "parallel_mlp"), True)
# Two layers with keys, then two that read these, a window and none each; each embeds the tokens.
SHARED = {name: value for name, value in GEMMA4.items() if "expert" not in name}
SHARED |= {"num_layers": 4, "num_sharing_layers": 2, "full_attention_layers": (1, 3)}
SHARED |= {"sharing_size": 96, "token_size": 8, "parallel_mlp": False}
# A delta net below gated attention, as Qwen3-Next alternates them.
HYBRID = EXPERTS | {"delta": DeltaConfig(2, 4, 8, 4, 4), "full_attention_layers": (1,)}
HYBRID |= {"shared_expert_size": 16, "rope": RopeConfig(share=0.5)}
HYBRID |= {"output_gate": True, "query_key_norm": True}
OLMO = {"sliding_window": 3, "full_attention_layers": (1,), "pre_norms": False}
OLMO |= {"post_norms": True, "joint_head_norm": True}
GLM = EXPERTS | {"router": "sigmoid", "routed_scale": 2.5, "shared_expert_size": 24}
GLM |= {"shared_gate": False, "rope": RopeConfig(share=0.5), "qkv_bias": True}
FAMILIES = {
    "gemma": (GEMMA, SMALL_TREE),
    "gemma 4": (GEMMA4, SMALL_TREE),
    "shared keys": (SHARED, parse_tree("paper25")),
    "experts": (EXPERTS, parse_tree("dynamic:5:3:2")),
    "sinks and biased experts": (GPT_OSS, SMALL_TREE),
    "alibi": ({"alibi": True}, parse_tree("dynamic:5:3:2")),
    "delta nets": (HYBRID, SMALL_TREE),
    "norms after branches": (OLMO, SMALL_TREE),
    "sigmoid router": (GLM, SMALL_TREE),
}
FAMILY_PROMPTS = random_prompts(8, seed=3)


# What experts need is in the family with sinks too.
SLOW = ("experts",)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FAMILIES],
)
def test_the_text_of_a_family_equals_plain_text(family):
    changes, tree = FAMILIES[family]
    config = dataclasses.replace(TINY, **{"num_layers": 2} | changes)
    usual = {"config": config, "batch_size": 4}
    texts = texts_of(decoded(None, "none", FAMILY_PROMPTS, NEW_TOKENS, **usual))
    # The judge has no cache: it reads the whole text anew for every token.
    assert plain_greedy(config, random_base(config), FAMILY_PROMPTS[0], NEW_TOKENS) == texts[0]
    rows = decoded(random_head(config), tree, FAMILY_PROMPTS, NEW_TOKENS, **usual)
    assert texts_of(rows) == texts
    assert np.concatenate([row.accepted for row in rows]).max() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_trains_a_step_and_decodes_the_plain_text(family, name):
    changes, _ = FAMILIES[family]
    config = dataclasses.replace(TINY, **{"num_layers": 2} | changes)
    base, head = random_base(config), random_head(config, name)[0]
    train = TrainStepConfig(config, head, OptimizerConfig(10, 5e-3, 0))
    # Compiled, so that no param is the base's own buffer: the step consumes its state.
    state = jax.jit(init_state, static_argnums=(0, 2))(train, base, 0)
    state, metrics = make_train_step(train)(state, base, random_batch())
    assert np.isfinite(metrics.loss)

    prompts, tree = FAMILY_PROMPTS[:2], default_tree(head.config.max_depth)
    texts = [plain_greedy(config, base, prompt, NEW_TOKENS) for prompt in prompts]
    assert texts_of(decoded((head, state.params), tree, prompts, NEW_TOKENS, config)) == texts


NEW_TOKENS = 24


def random_tree(num_nodes: int, seed: int) -> TreeConfig:
    """A tree grown at random: each node becomes the next child of a random node."""
    rng = np.random.default_rng(seed)
    children = {(): 0}
    while len(children) <= num_nodes:
        above = list(children)[rng.integers(len(children))]
        if len(above) < 7 and children[above] < 6:
            children[(*above, children[above])] = 0
            children[above] += 1
    return TreeConfig(f"random:{num_nodes}", tuple(path for path in children if path))


PROMPTS = random_prompts(200)
plain_texts = functools.cache(lambda: texts_of(decoded(None, "none", PROMPTS, NEW_TOKENS)))


def test_plain_decoding_is_the_argmax_of_full_forwards():
    for prompt, text in list(zip(PROMPTS, plain_texts(), strict=True))[:6]:
        assert plain_greedy(TINY, random_base(), prompt, NEW_TOKENS) == text


@pytest.mark.parametrize(
    ("tree", "batch_size", "count"),
    [
        (parse_tree("chain:1"), 3, 60),
        # Deeper than the head's five positions.
        pytest.param(parse_tree("chain:7"), 8, 200, marks=pytest.mark.slow),
        pytest.param(parse_tree("paper25"), 8, 100, marks=pytest.mark.accelerator),
        pytest.param(random_tree(11, 0), 3, 200, marks=pytest.mark.slow),
        pytest.param(random_tree(64, 1), 8, 200, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_speculative_text_equals_plain_text(tree, batch_size, count):
    rows = decoded(random_head(), tree, PROMPTS[:count], NEW_TOKENS, batch_size=batch_size)
    assert texts_of(rows) == plain_texts()[:count]
    # The test says something only if drafts are accepted, and not always.
    accepted = np.concatenate([row.accepted for row in rows])
    assert accepted.max() >= min(tree.depth, 4)
    assert accepted.min() == 0
    assert all(1 + sum(a + 1 for a in row.accepted) >= len(row.output_ids) for row in rows)


def drafter_case(name, tree):
    usual = {"clover": ("small",), "medusa": ("paper25",)}
    usual |= {"clover_lr": ("dynamic:9:3",), "dflash2": ("paper25",), "eagle": ("dynamic:9:3",)}
    marks = () if tree in usual.get(name, ()) else pytest.mark.slow
    return pytest.param(name, tree, marks=marks, id=f"{name}-{tree}")


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        drafter_case(name, tree)
        for name in DRAFTERS
        for tree in ("small", "clover4", "dynamic:9:3", "chain:3", "paper25")
        if tree != "paper25" or DRAFTERS[name][0] != "clover"  # of three positions
    ],
)
def test_every_drafters_text_equals_plain_text(name, tree):
    drafter = random_head(name=name)[0], lively_params(name=name)
    rows = decoded(drafter, SMALL_TREE if tree == "small" else tree, PROMPTS[:24], NEW_TOKENS)
    assert texts_of(rows) == plain_texts()[:24]
    accepted = np.concatenate([row.accepted for row in rows])
    assert accepted.max() >= 1
    assert accepted.min() == 0


def test_the_fast_path_accepts_what_the_slow_judge_accepts():
    head, draft_params = random_head()
    tree = parse_tree("paper25")
    prompts = [*PROMPTS[:3], PROMPTS[3] + list(range(90)) * 3]  # of more than a chunk of the cache
    rows = decoded(random_head(), tree, prompts, NEW_TOKENS, batch_size=1)
    for prompt, row in zip(prompts, rows, strict=True):
        text, accepted = speculative_greedy(
            head, draft_params, TINY, random_base(), prompt, NEW_TOKENS, tree
        )
        assert (row.output_ids, row.accepted) == (text, accepted)
