"""Heads that feed on their own output: what the tree drafts is what a long recomputation gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base
from clover_jax.models.decoder import causal_mask
from tests.decoding.reference import speculative_greedy
from tests.layer_heads import lively_head
from tests.tiny_models import TINY, decoded, random_base, random_prompts, texts_of

CONTEXT = (5, 9)  # committed positions of the two rows
ALIBI = dataclasses.replace(TINY, alibi=True)


@pytest.fixture(scope="module", params=[("eagle", TINY), ("eagle3", TINY), ("eagle", ALIBI)])
def any_head(request):
    return lively_head(*request.param)


def apply(head, method, *arguments, depth=()):
    """Call a method of the head, compiled; `depth` is advance's static last argument."""
    return compiled(head[0], method, depth)(head[1], *arguments)


@functools.cache
def compiled(drafter, method, depth):
    return jax.jit(
        lambda params, *rest: drafter.module.apply({"params": params}, *rest, *depth, method=method)
    )


@pytest.fixture(scope="module")
def committed(any_head):
    """Features and following tokens of two rows' contexts, as absorb takes them."""
    width = TINY.hidden_size * len(any_head[0].config.features)
    features = jax.random.normal(jax.random.key(3), (2, max(CONTEXT), width))
    tokens = jax.random.randint(jax.random.key(4), (2, max(CONTEXT)), 0, TINY.vocab_size)
    return features, tokens


def recomputed(any_head, committed, row, path):
    """Return the output at the end of a path by causal forwards over context and path.

    A drafted token's state is its parent's output, so they are found one after another; what lies
    beyond is padding, which the causal mask keeps apart.
    """
    features, tokens = (x[row : row + 1, : CONTEXT[row]] for x in committed)
    frozen = frozen_from_base(random_base())
    size, at = 12, CONTEXT[row]  # one size for all, so that it compiles once
    states = jnp.pad(apply(any_head, "fuse", features), ((0, 0), (0, size - at), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, size - at)))
    positions, mask = jnp.arange(size)[None], causal_mask(1, size)
    for token in [*path, None]:
        hidden, _ = apply(any_head, "run", frozen.embedding[tokens], states, positions, mask)
        if token is not None:
            states = states.at[:, at].set(hidden[:, at - 1])
            tokens, at = tokens.at[:, at].set(token), at + 1
    return hidden[0, at - 1]


def test_states_of_a_drafted_tree_equal_a_full_recomputation_along_each_path(any_head, committed):
    frozen = frozen_from_base(random_base())
    cache = any_head[0].module.init_cache(2, 32, jnp.float32)
    # In two pieces of unequal lengths, the second with rows of garbage at the end.
    first, rest = jnp.array([3, 3]), jnp.array(CONTEXT) - 3
    zero = jnp.zeros(2, jnp.int32)
    features, tokens = committed
    begun = AcceptedPositions(features[:, :3], tokens[:, :3], zero, first, tokens)
    _, cache = apply(any_head, "absorb", frozen, begun, cache)
    others = AcceptedPositions(features[:, 3:], tokens[:, 3:], first, rest, tokens)
    state, cache = apply(any_head, "absorb", frozen, others, cache)
    # Every row chooses parents of its own, out of order, as an adaptive tree does.
    levels = [
        ([[0, 0, 0]] * 2, [[7, 8, 9], [17, 18, 19]]),
        ([[2, 0, 0], [1, 1, 2]], [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2], [2, 0]], [[11, 12], [13, 14]]),
    ]
    paths = [[()], [()]]  # of each row's branches
    for depth, (parents, drafted) in enumerate(levels, start=1):
        arguments = (frozen, state, cache, jnp.array(parents), jnp.array(drafted))
        state = apply(any_head, "advance", *arguments, depth=(depth,))
        paths = [
            [(*paths[row][p], t) for p, t in zip(parents[row], drafted[row], strict=True)]
            for row in range(2)
        ]
        for row in range(2):
            for branch, path in enumerate(paths[row]):
                expected = recomputed(any_head, committed, row, path)
                np.testing.assert_allclose(state.hidden[row, branch], expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        pytest.param("chain:6", 3, marks=pytest.mark.slow),
        pytest.param("paper25", 1, marks=pytest.mark.slow),
        ("dynamic:12:5:4", 3),
    ],
)
def test_greedy_text_equals_plain_text(kind, name, batch_size):
    prompts = random_prompts(12, seed=11)
    rows = decoded(lively_head(kind), name, prompts, 24, batch_size=batch_size)
    assert texts_of(rows) == texts_of(decoded(None, "none", prompts, 24))
    accepted = np.concatenate([row.accepted for row in rows])
    assert accepted.max() >= 2
    assert accepted.min() == 0


@pytest.mark.parametrize(
    ("kind", "table"), [("eagle", None), ("eagle3", tuple(range(0, TINY.vocab_size, 2)))]
)
def test_the_fast_path_accepts_what_the_slow_judge_accepts(kind, table):
    drafter = lively_head(kind, draft_to_target=table)
    prompts, tree = random_prompts(2, seed=4), parse_tree("chain:3")
    rows = decoded(drafter, tree, prompts, 12, batch_size=1)
    for prompt, row in zip(prompts, rows, strict=True):
        text, accepted = speculative_greedy(*drafter, TINY, random_base(), prompt, 12, tree)
        assert (row.output_ids, row.accepted) == (text, accepted)
