"""Delta nets against a walk from node to node, each with a state of its own, in float64.

Largest error of outputs and of the committed state, of values up to 1 (`-s` prints it):

| tree | float32 | inputs in bfloat16 |
| --- | --- | --- |
| 25 nodes | 4.3e-7 | 5.9e-3 |
| 63 nodes | 5.1e-7 | 5.7e-3 |
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import DeltaConfig
from clover_jax.decoding.tree import ancestor_mask
from clover_jax.models.cache import gather_rows
from clover_jax.models.decoder import packed_mask
from clover_jax.models.delta_net import (
    WINDOW,
    DeltaRows,
    DeltaState,
    Tokens,
    convolve,
    move_state,
    parents,
    read_documents,
    read_window,
)

NET = DeltaConfig(num_key_heads=2, num_value_heads=6, key_size=16, value_size=8)
ROWS, HEADS, GROUPS = 2, NET.num_key_heads, NET.num_groups


def random_tokens(size, seed=0):
    """Tokens of ROWS rows as a layer makes them: keys of length 1, strengths in 0 .. 1."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(ROWS, HEADS, *shape))

    query, key = normal(size, NET.key_size), normal(size, NET.key_size)
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    strength = 1 / (1 + np.exp(-normal(GROUPS, size)))
    value, decay = normal(GROUPS, size, NET.value_size), -np.exp(normal(GROUPS, size) - 1)
    return Tokens(*(x.astype(np.float32) for x in (query, key, value, strength, decay)))


def random_state(seed=1):
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(ROWS, HEADS, GROUPS, NET.value_size, NET.key_size))
    conv = rng.normal(size=(ROWS, HEADS, NET.conv_size - 1, NET.channels))
    return DeltaState(state.astype(np.float32), conv.astype(np.float32))


def random_tree(size, seed=0):
    """Parents [ROWS, size] of trees that are a few levels deep, another one for each row."""
    rng = np.random.default_rng(seed)
    return np.array([[-1, *(rng.integers(max(0, n - 9), n) for n in range(1, size))]] * ROWS)


def walk(tokens, parent, state):
    """Return outputs and states of all nodes [ROWS, T, K, G, ..]: each moves its parent's state."""
    q, k, v, beta, g = (np.asarray(x, np.float64) for x in tokens)
    outputs, states = [], []
    for row in range(len(q)):
        known, given = [], []
        for node, above in enumerate(parent[row]):
            s = np.float64(state[row]) if above < 0 else known[above]
            s = s * np.exp(g[row, :, :, node])[..., None, None]
            key, query = k[row, :, node], q[row, :, node]
            u = v[row, :, :, node] - np.einsum("kh,kgeh->kge", key, s)
            u = beta[row, :, :, node, None] * u
            s = s + np.einsum("kh,kge->kgeh", key, u)
            known.append(s)
            given.append(np.einsum("kh,kgeh->kge", query, s))
        outputs.append(given)
        states.append(known)
    return np.array(outputs), np.array(states)


def path_to(parent, node):
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


def rows_of(tokens, update, inputs):
    joined = np.moveaxis(update, 2, 3).reshape(*update.shape[:2], update.shape[3], -1)
    return DeltaRows(tokens.key, joined, np.moveaxis(tokens.decay, 2, 3), inputs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [25, 63])
def test_a_tree_read_at_once_is_a_walk_from_node_to_node(size, dtype):
    exact, state, parent = random_tokens(size, size), random_state(), random_tree(size)
    # A base in bfloat16 hands over such numbers; the rule itself stays in float32.
    tokens = Tokens(*(np.asarray(jnp.asarray(x, dtype), np.float32) for x in exact))
    mask = ancestor_mask(jnp.asarray(parent), size)
    output, update = jax.jit(read_window)(tokens, mask, state.state)
    expected, states = walk(exact, parent, state.state)
    error = np.abs(np.moveaxis(np.asarray(output), 3, 1) - expected).max()

    # Paths of each row's own length, and one row where nothing is accepted.
    inputs = np.random.default_rng(3).normal(size=(ROWS, HEADS, size, NET.channels))
    rows = rows_of(tokens, np.asarray(update), inputs.astype(np.float32))
    for node in (0, size // 2, size - 1):
        path = path_to(parent[0], node)
        index = jnp.array([path + [0] * (size - len(path))] * ROWS)
        moved = jax.jit(move_state)(state, gather_rows(rows, index), jnp.array([len(path), 0]))
        error = max(error, np.abs(np.asarray(moved.state[0]) - states[0, node]).max())
        np.testing.assert_array_equal(moved.state[1], state.state[1])
        np.testing.assert_array_equal(moved.conv[1], state.conv[1])
        along = np.concatenate([state.conv[0], inputs[0][:, path]], axis=1)
        np.testing.assert_allclose(moved.conv[0], along[:, -(NET.conv_size - 1) :], atol=1e-6)
    print(f"{size} nodes, {jnp.dtype(dtype).name}: {error:.1e}")
    assert error < (1e-5 if dtype == jnp.float32 else 5e-2)


def test_documents_that_are_packed_do_not_see_each_other_nor_what_pads_them():
    """A document within a window, one across two edges, one of a token, and padding behind."""
    lengths = (WINDOW // 2, 2 * WINDOW, 1, WINDOW + 9)
    size = sum(lengths) + 5
    segments = np.zeros((ROWS, size), np.int32)
    segments[:, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths) + 1
    tokens, empty = random_tokens(size), np.zeros_like(random_state().state)
    output, _ = jax.jit(read_documents)(tokens, packed_mask(jnp.asarray(segments)), empty)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        one = Tokens(*(x[:, :, part] for x in tokens[:2]), *(x[:, :, :, part] for x in tokens[2:]))
        chain = np.tile(np.arange(length) - 1, (ROWS, 1))
        expected, _ = walk(one, chain, empty)
        found = np.moveaxis(np.asarray(output[:, :, :, part]), 3, 1)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        start += length
    assert np.isfinite(output).all()


def test_the_convolution_reads_a_node_s_ancestors_and_then_the_text_before():
    size, parent = 12, random_tree(12)
    rng, state = np.random.default_rng(0), random_state()
    inputs = rng.normal(size=(ROWS, HEADS, size, NET.channels)).astype(np.float32)
    kernel = rng.normal(size=(NET.conv_size, HEADS, NET.channels)).astype(np.float32)
    mask = ancestor_mask(jnp.asarray(parent), size)
    assert parents(mask).tolist() == parent.tolist()
    assert parents(jnp.tril(jnp.ones((1, 3, 3), bool)))[0].tolist() == [-1, 0, 1]
    found = np.asarray(jax.jit(convolve)(inputs, state.conv, kernel, mask))
    for node in range(size):
        read = np.concatenate([state.conv[0], inputs[0][:, path_to(parent[0], node)]], axis=1)
        expected = np.einsum("kwc,wkc->kc", read[:, -NET.conv_size :], kernel)
        np.testing.assert_allclose(found[0, :, node], expected, atol=1e-5)


def test_a_node_off_the_path_may_be_infinite():
    tokens, state = random_tokens(4), random_state()
    broken = functools.partial(np.full_like, fill_value=np.inf)
    rows = rows_of(tokens, tokens.value, np.zeros((ROWS, HEADS, 4, NET.channels), np.float32))
    spoilt = jax.tree.map(lambda x: np.concatenate([x[:, :, :2], broken(x[:, :, 2:])], 2), rows)
    count = jnp.array([2, 1])
    moved = (jax.jit(move_state)(state, each, count) for each in (rows, spoilt))
    jax.tree.map(np.testing.assert_array_equal, *moved)
