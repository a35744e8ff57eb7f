import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding import accept
from clover_jax.decoding.tree import TokenTree
from clover_jax.drafters.drafter import PAD_TOKEN

# Op by op, every operation on every shape would be compiled by itself.
accept_path = jax.jit(accept.accept_path)
accept_forced = jax.jit(accept.accept_forced, static_argnames="count")


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
