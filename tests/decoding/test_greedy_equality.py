"""Speculative decoding must write what plain decoding writes, token for token."""

import functools

import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from tests.decoding.reference import plain_greedy, speculative_greedy
from tests.tiny_models import (
    DRAFTERS,
    SMALL_TREE,
    TINY,
    decode_all,
    lively_params,
    random_base,
    random_head,
    random_prompts,
)

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


@functools.cache
def plain_texts():
    engine = Engine(TINY, None, TreeConfig.root_only(), batch_size=8)
    return [row.output_ids for row in decode_all(engine, random_base(), None, PROMPTS, NEW_TOKENS)]


PROMPTS = random_prompts(200)


def test_plain_decoding_is_the_argmax_of_full_forwards():
    for prompt, text in list(zip(PROMPTS, plain_texts(), strict=True))[:6]:
        assert plain_greedy(TINY, random_base(), prompt, NEW_TOKENS) == text


@pytest.mark.parametrize(
    ("tree", "batch_size", "count"),
    [
        (parse_tree("chain:1"), 3, 60),
        pytest.param(parse_tree("chain:1"), 3, 200, marks=pytest.mark.slow),
        # Deeper than the head's five positions.
        pytest.param(parse_tree("chain:7"), 8, 200, marks=pytest.mark.slow),
        pytest.param(parse_tree("paper25"), 8, 100, marks=pytest.mark.accelerator),
        pytest.param(random_tree(11, 0), 3, 200, marks=pytest.mark.slow),
        pytest.param(random_tree(64, 1), 8, 200, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_speculative_text_equals_plain_text(tree, batch_size, count):
    head, draft_params = random_head()
    engine = Engine(TINY, head, tree, batch_size=batch_size)
    rows = decode_all(engine, random_base(), draft_params, PROMPTS[:count], NEW_TOKENS)
    assert [row.output_ids for row in rows] == plain_texts()[:count]
    # The test says something only if drafts are accepted, and not always.
    accepted = np.concatenate([row.accepted for row in rows])
    assert accepted.max() >= min(tree.depth, 4)
    assert accepted.min() == 0
    assert all(1 + sum(a + 1 for a in row.accepted) >= len(row.output_ids) for row in rows)


def drafter_case(name, tree):
    usual = {"clover": ("small",), "medusa": ("paper25",)}
    usual |= {"clover_lr": ("dynamic:9:3",), "dflash2": ("paper25",)}
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
    tree = SMALL_TREE if tree == "small" else parse_tree(tree)
    engine = Engine(TINY, random_head(name=name)[0], tree, batch_size=8)
    prompts, params = PROMPTS[:24], lively_params(name=name)
    rows = decode_all(engine, random_base(), params, prompts, NEW_TOKENS)
    assert [row.output_ids for row in rows] == plain_texts()[: len(prompts)]
    accepted = np.concatenate([row.accepted for row in rows])
    assert accepted.max() >= 1
    assert accepted.min() == 0


def test_the_fast_path_accepts_what_the_slow_judge_accepts():
    head, draft_params = random_head()
    tree = parse_tree("paper25")
    prompts = [*PROMPTS[:3], PROMPTS[3] + list(range(90)) * 3]  # of more than a chunk of the cache
    rows = decode_all(Engine(TINY, head, tree), random_base(), draft_params, prompts, NEW_TOKENS)
    for prompt, row in zip(prompts, rows, strict=True):
        text, accepted = speculative_greedy(
            head, draft_params, TINY, random_base(), prompt, NEW_TOKENS, tree
        )
        assert (row.output_ids, row.accepted) == (text, accepted)
