"""The ranks of a head, against what speculative decoding accepts of the same text."""

import jax.numpy as jnp

from clover_jax.benchmark.calibration import measure_ranks
from clover_jax.benchmark.subject import Subject
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.step import Weights
from clover_jax.decoding.tree import parse_tree
from tests.tiny_models import TINY, random_base, random_head, random_prompts

NEW_TOKENS = 24


def test_leading_zeros_are_what_a_chain_accepts(way):
    head, params = random_head()
    tree = parse_tree("chain:3")
    subject = Subject(TINY, head, tree, Weights(random_base(), params), jnp.float32)
    prompts = random_prompts(2, seed=4)
    ranks = measure_ranks(subject, prompts, NEW_TOKENS, depth=3, batch_size=2)
    samples = ranks.reshape(NEW_TOKENS - 4, 2, 3)
    rows = Engine(TINY, head, tree, batch_size=2).generate(
        random_base(), params, prompts, NEW_TOKENS
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
