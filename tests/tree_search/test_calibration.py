"""The ranks of a head, against what speculative decoding accepts of the same text."""

from types import SimpleNamespace

import jax.numpy as jnp

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters.drafter import FewTokens
from clover_jax.tree_search.calibration import _rank_of, measure_ranks
from tests.tiny_models import (
    TINY,
    decode_all,
    random_base,
    random_head,
    random_models,
    random_prompts,
)

NEW_TOKENS = 24


def test_leading_zeros_are_what_a_chain_accepts(way):
    head, params = random_head()
    tree = parse_tree("chain:3")
    subject = random_models(head, params, tree)
    prompts = random_prompts(2, seed=4)
    ranks = measure_ranks(subject, prompts, NEW_TOKENS, 3, SamplingParams())
    samples = ranks.reshape(NEW_TOKENS - 4, 2, 3)
    rows = decode_all(
        Engine(TINY, head, tree, batch_size=2), random_base(), params, prompts, NEW_TOKENS
    )
    checked = 0
    for number, row in enumerate(rows):
        position = 0
        for accepted in row.accepted:
            if position < len(samples):
                zeros = [*(samples[position, number] == 0), False].index(False)
                assert zeros == accepted
                checked += 1
            position += accepted + 1
    assert checked > 10


def test_a_text_is_drawn_as_it_will_be():
    head, params = random_head()
    subject = random_models(head, params, parse_tree("chain:3"))
    prompts = random_prompts(2, seed=4)
    ways = [
        SamplingParams(),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0),
        SamplingParams(top_p=0.5),
    ]
    greedy, narrow, wide, ignored = (
        measure_ranks(subject, prompts, NEW_TOKENS, 3, way).tolist() for way in ways
    )
    assert greedy == narrow == ignored != wide


def test_a_token_that_the_head_lacks_has_no_rank():
    config = SimpleNamespace(draft_to_target=(3, 5), vocab_size=6, draft_vocab_size=2)
    ranks = _rank_of(config, jnp.array([[[1.0, 2.0]]] * 3), jnp.array([3, 5, 4]))
    assert ranks[:2].tolist() == [1, 0]
    assert ranks[2] > 10**6  # however few tokens the head has
    few = FewTokens(jnp.array([[[7, 4]]] * 3), jnp.log(jnp.array([[[0.5, 0.2]]] * 3)))
    ranks = _rank_of(config, few, jnp.array([7, 4, 3]))
    assert ranks[:2].tolist() == [0, 1]
    assert ranks[2] > 10**6
