import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.state import EOS, LENGTH, RUNNING, empty_state
from clover_jax.decoding.step import (
    StepConfig,
    Weights,
    _by_position,
    _by_slice,
    append_bonus,
    commit,
    cut,
    sibling_ranks,
    verify_tree,
    write_tokens,
)
from clover_jax.decoding.tree import TokenTree, ancestor_mask, node_depth
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.models.cache import write_rows
from clover_jax.models.decoder import Decoder, causal_mask
from tests.tiny_models import TINY, random_base


def test_cut_of_the_docstring():
    emission = cut(jnp.array([[4, 2, 9]]), jnp.array([3]), jnp.array([8]), jnp.array([[2]]))
    assert (emission.count.tolist(), emission.finish.tolist()) == ([2], [EOS])


@pytest.mark.parametrize(
    ("count", "room", "eos", "emitted", "finish"),
    [
        (3, 8, -1, 3, RUNNING),
        (3, 3, -1, 3, LENGTH),
        (3, 2, -1, 2, LENGTH),
        (3, 2, 2, 2, EOS),  # the EOS token is the last that fits
        (3, 1, 2, 1, LENGTH),  # it would come after the limit
        (1, 8, 2, 1, RUNNING),  # it lies beyond the accepted tokens
    ],
)
def test_the_first_of_eos_and_limit_ends_a_row(count, room, eos, emitted, finish):
    emission = cut(
        jnp.array([[4, 2, 9]]), jnp.array([count]), jnp.array([room]), jnp.array([[eos]])
    )
    assert (emission.count.tolist(), emission.finish.tolist()) == ([emitted], [finish])


def test_append_bonus_of_the_docstring():
    tokens = append_bonus(jnp.array([[7, 8, 0]]), jnp.array([2]), jnp.array([4]))
    assert tokens.tolist() == [[7, 8, 4, 4]]


def test_write_tokens_of_the_docstring():
    written = write_tokens(jnp.array([[5, 6, 0, 0]]), jnp.array([[7, 8]]), jnp.array([1]))
    assert written.tolist() == [[5, 7, 8, 0]]


def test_a_tpu_writes_the_same_tokens_in_its_own_way():
    tokens, new = jnp.arange(20).reshape(2, 10), jnp.array([[-1, -2, -3], [-4, -5, -6]])
    start = jnp.array([7, 0])  # up to the last position, and from the first
    written = _by_position(tokens, new, start)
    assert written.tolist() == _by_slice(tokens, new, start).tolist()
    assert written[0, 6:].tolist() == [6, -1, -2, -3]


def test_sibling_ranks_of_the_docstring():
    ranks = sibling_ranks(jnp.array([[-1, 0, 0, 1, 0]]), jnp.array([[4, 3, 2]]))
    assert ranks.tolist() == [[2, 0, 1]]


SLOTS, PREFIX = 7, 20


@st.composite
def paths_in_trees(draw):
    """A random tree for each of two rows, a path in it, and ragged lengths."""
    parents, paths = [], []
    for _ in range(2):
        parent = [-1, *(draw(st.integers(0, slot - 1)) for slot in range(1, SLOTS))]
        path = [draw(st.integers(0, SLOTS - 1))]
        while path[0]:
            path.insert(0, parent[path[0]])
        parents.append(parent)
        paths.append(path)
    lengths = draw(st.lists(st.integers(1, PREFIX), min_size=2, max_size=2))
    return parents, paths, lengths, draw(st.integers(0, 2**30))


@settings(deadline=None, max_examples=8)
@given(paths_in_trees())
def test_the_cache_after_commit_is_that_of_a_plain_prefill(case):
    parents, paths, lengths, seed = case
    params, depth = random_base(), SLOTS - 1
    tree_config = TreeConfig("chain", tuple((0,) * d for d in range(1, SLOTS)))  # fixes A only
    state = _empty_state(TINY, None, tree_config, 2, 64, 1, jnp.float32)
    rng = np.random.default_rng(seed)
    text = rng.integers(0, TINY.vocab_size, (2, 64))
    length = jnp.array(lengths)
    state = state.replace(
        tokens=jnp.asarray(text, jnp.int32),
        length=length,
        end=length + 1,
        limit=length + 40,
        finish=jnp.zeros(2, jnp.int32),
    )
    before = _prefill(params, jnp.asarray(text[:, :PREFIX]))
    state = state.replace(
        cache=write_rows(state.cache, before.fresh, jnp.zeros(2, jnp.int32)),
        # The head's features are not under test here.
        features=jnp.zeros((2, SLOTS, 0)),
    )
    tokens = rng.integers(0, TINY.vocab_size, (2, SLOTS))
    tokens[:, 0] = text[np.arange(2), lengths]
    tree = TokenTree(jnp.asarray(tokens), jnp.array(parents), depth)
    verified = _verify(params, state, tree)
    padded = jnp.array([path + [0] * (SLOTS - len(path)) for path in paths])
    count = jnp.array([len(path) - 1 for path in paths])
    accepted = Accepted(padded, count, jnp.array([3, 4]))

    new, record = jax.jit(commit)(state, tree, accepted, verified.fresh, verified.features)

    assert record.emitted.tolist() == [len(path) for path in paths]
    assert record.proposed.tolist() == [SLOTS - 1] * 2
    for row, path in enumerate(paths):
        earlier = [parents[row][1:slot].count(parents[row][slot]) for slot in path[1:]]
        assert record.ranks[row, : len(path) - 1].tolist() == earlier
    for row, path in enumerate(paths):
        start, emitted = lengths[row], len(path)
        expected_text = [*text[row, :start], *tokens[row, path], 3 + row]
        end = int(new.end[row])
        assert new.tokens[row, :end].tolist() == expected_text
        assert int(new.length[row]) == start + emitted == end - 1
        committed = np.zeros((1, 40), np.int32)
        committed[0, : end - 1] = expected_text[:-1]
        plain = _prefill(params, jnp.asarray(committed))
        for layer, expected in zip(new.cache, plain.fresh, strict=True):
            for got, want in ((layer.key, expected.key), (layer.value, expected.value)):
                np.testing.assert_allclose(got[row, :, : end - 1], want[0, :, : end - 1], atol=2e-5)


def test_a_finished_row_does_not_change():
    tree_config = TreeConfig("chain", ((0,),))
    state = _empty_state(TINY, None, tree_config, 1, 64, 1, jnp.float32)
    state = state.replace(
        tokens=jnp.arange(64)[None], length=jnp.array([5]), end=jnp.array([6]), limit=jnp.array([6])
    ).replace(finish=jnp.array([LENGTH]), features=jnp.zeros((1, 2, 0)))
    tree = TokenTree(jnp.array([[5, 7]]), jnp.array([[-1, 0]]), depth=1)
    verified = _verify(random_base(), state, tree)
    accepted = Accepted(jnp.array([[0, 1]]), jnp.array([1]), jnp.array([3]))
    new, record = jax.jit(commit)(state, tree, accepted, verified.fresh, verified.features)
    for name in ("tokens", "length", "end", "limit", "finish"):
        np.testing.assert_array_equal(getattr(new, name), getattr(state, name), err_msg=name)
    for layer, old in zip(new.cache, state.cache, strict=True):
        np.testing.assert_array_equal(layer.key[:, :, :5], old.key[:, :, :5])
    assert (record.accepted.tolist(), record.emitted.tolist()) == ([0], [0])
    assert record.proposed.tolist() == [0]


def test_node_depth_gives_the_positions_of_a_tree():
    mask = ancestor_mask(jnp.array([[-1, 0, 0, 2]]), 2)
    assert node_depth(mask).tolist() == [[0, 1, 1, 2]]


@jax.jit
def _prefill(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Decoder(TINY).apply({"params": params}, tokens, positions, causal_mask(*tokens.shape))


@jax.jit
def _verify(params, state, tree):
    plain = StepConfig(TINY, None, TreeConfig.root_only())
    return verify_tree(plain, Weights(params, {}), state, tree)


_empty_state = jax.jit(empty_state, static_argnums=tuple(range(7)))
