"""tau and hit rates counted by hand; which drafted tokens a step accepts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding import accept, step
from clover_jax.decoding.requests import (
    AcceptedLengths,
    Request,
    least_sampling,
    requests_of_every_kind,
)
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.decoding.step import largest, largest_in_parts
from clover_jax.decoding.tree import TokenTree
from clover_jax.drafters.drafter import PAD_TOKEN

# Op by op, every operation on every shape would be compiled by itself.
accept_path = jax.jit(accept.accept_path)
accept_forced = jax.jit(accept.accept_forced, static_argnames="count")

MOST = SamplingConfig("lossless", truncate=True, biased=True)  # as a server has it
CHANGES = (
    *({"params": SamplingParams(**params)} for params in ({"temperature": 1.0}, {"top_k": 5})),
    {"params": SamplingParams(temperature=1.0, top_k=5)},
    {"params": SamplingParams(temperature=1.0, top_p=0.5)},
    {"wants_scores": True},
    {"wants_prompt_scores": True},
    {"min_new_tokens": 1},
    {"logit_bias": ((3, 1.0),)},
)


def tally(*answers):
    lengths = AcceptedLengths()
    for num_tokens, accepted in answers:
        lengths.add(num_tokens, accepted)
    return lengths


def test_tau_counts_what_is_left_after_the_cut_and_hit_rates_what_came_before_it():
    # 1 + (2+1) + (0+1) + (3+1) tokens, the last forward cut by one.
    lengths = tally((8, [2, 0, 3]))
    assert lengths.tau == pytest.approx(7 / 3)
    assert 1 + sum(lengths.hit_rate(3)) == pytest.approx(8 / 3)


def test_rates_of_several_answers_are_those_of_all_their_forwards():
    lengths = tally((9, [2, 0, 3]), (3, [1]))
    assert (lengths.tokens, lengths.forwards) == (12, 4)
    assert lengths.hit_rate(4) == [3 / 4, 2 / 4, 1 / 4, 0]
    assert lengths.conditional_hit_rate(4) == [3 / 4, 2 / 3, 1 / 2, 0]
    assert lengths.histogram() == [1, 1, 1, 1]
    assert lengths.histogram(1) == [1, 1]


def test_nothing_decoded_has_no_rates():
    lengths = tally((1, []))
    assert (lengths.tau, lengths.hit_rate(2), lengths.histogram()) == (None, [], [])
    assert lengths.conditional_hit_rate(2) == [None, None]


def test_accept_path_of_the_docstring():
    tree = TokenTree(jnp.array([[5, 7, 8, 9]]), jnp.array([[-1, 0, 1, 0]]), depth=2)
    accepted = accept_path(tree, jnp.array([[7, 8, 4, 0]]))
    assert accepted.path.tolist() == [[0, 1, 2]]
    assert (accepted.count.tolist(), accepted.bonus.tolist()) == ([2], [4])


def test_without_an_agreeing_child_the_bonus_is_the_roots_argmax():
    tree = TokenTree(jnp.array([[5, 7, 9]]), jnp.array([[-1, 0, 0]]), depth=1)
    accepted = accept_path(tree, jnp.array([[3, 7, 9]]))
    assert (accepted.count.tolist(), accepted.bonus.tolist()) == ([0], [3])


@st.composite
def trees_with_argmax(draw, slots=10, vocabulary=4):
    """A tree whose siblings differ, and the base's argmax at every slot."""
    parent, tokens = [-1], [draw(st.integers(0, vocabulary - 1))]
    for slot in range(1, slots):
        above = draw(st.integers(0, slot - 1))
        taken = {tokens[s] for s in range(1, slot) if parent[s] == above}
        free = [token for token in range(vocabulary) if token not in taken]
        parent.append(above if free else 0)
        tokens.append(draw(st.sampled_from(free)) if free else PAD_TOKEN)
    best = draw(st.lists(st.integers(0, vocabulary - 1), min_size=slots, max_size=slots))
    return parent, tokens, best


@settings(deadline=None, max_examples=100)
@given(trees_with_argmax())
def test_the_accepted_path_is_the_walk_along_the_argmax(case):
    parent, tokens, best = case
    path = [0]
    while True:
        slot = path[-1]
        children = [s for s, p in enumerate(parent) if p == slot and tokens[s] == best[slot]]
        if not children:
            break
        path.append(children[0])
    tree = TokenTree(jnp.array([tokens]), jnp.array([parent]), depth=len(parent) - 1)
    accepted = accept_path(tree, jnp.array([best]))
    count = int(accepted.count[0])
    assert accepted.path[0, : count + 1].tolist() == path
    np.testing.assert_array_equal(accepted.path[0, count + 1 :], 0)
    assert int(accepted.bonus[0]) == best[path[-1]]


def test_forced_acceptance_takes_a_path_of_that_length_with_most_of_the_base_s_choices():
    tree = TokenTree(jnp.array([[5, 1, 2, 3, 0]]), jnp.array([[-1, 0, 0, 2, 1]]), depth=2)
    choices = jnp.array([[2, 9, 9, 4, 9]])
    forced = [accept_forced(tree, choices, count=count) for count in (0, 1, 2)]
    assert [accepted.count.tolist() for accepted in forced] == [[0], [1], [2]]
    assert forced[1].path[0, :2].tolist() == [0, 2]
    assert forced[2].path.tolist() == [[0, 2, 3]]
    assert (forced[0].bonus.tolist(), forced[2].bonus.tolist()) == ([2], [4])


def test_forced_acceptance_never_takes_padding():
    tree = TokenTree(jnp.array([[5, PAD_TOKEN]]), jnp.array([[-1, 0]]), depth=1)
    assert accept_forced(tree, jnp.zeros((1, 2), int), count=1).count.tolist() == [0]


def test_parts_of_the_vocabulary_give_the_same_choices(monkeypatch):
    monkeypatch.setattr(step, "MOST_LOGITS", 1024)
    matrix = jax.random.normal(jax.random.key(0), (2500, 16))  # the last part is a shorter one
    hidden = jax.random.normal(jax.random.key(1), (3, 40, 16))
    found = largest_in_parts(matrix, hidden)
    assert found.shape == (3, 40)
    assert (found == largest(matrix, hidden)).all()
    assert len(set((found // 1024).ravel().tolist())) == 3  # every part wins somewhere


def test_the_lowest_of_equal_tokens_is_chosen_over_parts(monkeypatch):
    monkeypatch.setattr(step, "MOST_LOGITS", 1024)
    matrix = jnp.zeros((3000, 4)).at[jnp.array([7, 1030, 2900]), 0].set(1.0)
    hidden = jnp.zeros((5, 4)).at[:, 0].set(1.0)
    assert largest_in_parts(matrix, hidden).tolist() == [7] * 5


def test_there_is_a_request_of_every_kind_that_a_batch_can_be_of():
    kinds = {least_sampling(MOST, [request]) for request in requests_of_every_kind(4)}
    asked = [
        Request(0, [0], 2, **dict(itertools.chain.from_iterable(c.items() for c in changes)))
        for count in range(len(CHANGES) + 1)
        for changes in itertools.combinations(CHANGES, count)
    ]
    alone = {least_sampling(MOST, [request]) for request in asked}
    beside = {least_sampling(MOST, pair) for pair in itertools.combinations(asked, 2)}
    assert alone | beside == kinds
