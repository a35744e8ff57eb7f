"""A window hides and ALiBi lowers by distance, from fresh rows and from every part of the cache."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import LayerConfig
from clover_jax.models.attention import READ_POLICIES, attend
from clover_jax.models.cache import KeyValue
from clover_jax.models.score_rules import ScoreRules, alibi_slopes

LAYER = LayerConfig(hidden_size=12, intermediate_size=8, num_heads=6, num_kv_heads=3, head_dim=4)
# A tree after the committed text: the root, two children, a grandchild under the first.
PARENT_MASK = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
DEPTH = np.array([0, 1, 1, 2])


def test_the_docstrings_slopes():
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]


def test_a_layer_without_rules_has_no_distance():
    assert ScoreRules.of(LAYER, jnp.zeros((1, 2), jnp.int32)) is None


def test_a_window_as_large_as_the_span_costs_nothing():
    config = dataclasses.replace(LAYER, sliding_window=260)
    rules = ScoreRules.of(config, jnp.zeros((1, 4), jnp.int32))
    assert rules.within(261).window == 260
    assert rules.within(260) is None


def test_an_empty_row_does_not_make_the_others_read_what_their_window_hides():
    config = dataclasses.replace(LAYER, sliding_window=100)
    rules = ScoreRules.of(config, jnp.zeros((2, 4), jnp.int32))
    assert rules.first_needed(jnp.array([600, 800])) == 501
    assert rules.first_needed(jnp.array([0, 800])) == 701
    assert rules.first_needed(jnp.array([30, 800])) == 0


def naive(query, fresh, cache, length, config):
    """Softmax over the committed and the fresh positions of one row, pair by pair."""
    keys = np.concatenate([cache.key[:, :length], fresh.key], axis=1)  # [K, length + T, H]
    values = np.concatenate([cache.value[:, :length], fresh.value], axis=1)
    positions = np.concatenate([np.arange(length), length + DEPTH])
    slopes = alibi_slopes(config.num_heads) if config.alibi else np.zeros(config.num_heads)
    slopes = slopes.reshape(config.num_kv_heads, -1)
    scores = np.einsum("kgth,ksh->kgts", query, keys) * config.head_dim**-0.5
    back = (length + DEPTH)[:, None] - positions
    scores -= slopes[:, :, None, None] * back
    seen = np.concatenate([np.ones((4, length), bool), PARENT_MASK], axis=1)
    if config.sliding_window:
        seen &= back < config.sliding_window
    weights = np.where(seen, np.exp(scores), 0)
    return np.einsum("kgts,ksh->kgth", weights / weights.sum(axis=-1, keepdims=True), values)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("rows_scores", [None, 1], ids=["all rows", "row by row"])
@pytest.mark.parametrize(
    "rules",
    [{"sliding_window": 1}, {"sliding_window": 2}, {"sliding_window": 300}, {"alibi": True}],
    ids=["a window of one", "a window within the tree", "a window over chunks", "alibi"],
)
def test_a_tree_after_caches_of_several_lengths(rules, rows_scores, platform, monkeypatch):
    policy = dataclasses.replace(READ_POLICIES[platform], rows_scores=rows_scores)
    monkeypatch.setitem(READ_POLICIES, "cpu", policy)
    config = dataclasses.replace(LAYER, **rules)
    # The window skips whole chunks of the last row alone. A GPU reads a small one's part of it.
    lengths = np.array([0, 5, 700])
    for rows in ([0, 1, 2], [2]):
        keys = jax.random.split(jax.random.key(0), 5)
        batch, kv = len(rows), config.num_kv_heads
        query = jax.random.normal(keys[0], (batch, kv, config.num_groups, 4, 4))
        shapes = [(batch, kv, 4, 4)] * 2 + [(batch, kv, 768, 4)] * 2
        parts = [jax.random.normal(k, s) for k, s in zip(keys[1:], shapes, strict=True)]
        fresh, cache = KeyValue(*parts[:2]), KeyValue(*parts[2:])
        length = jnp.asarray(lengths[rows])
        mask = jnp.broadcast_to(PARENT_MASK, (batch, 4, 4))

        @jax.jit
        def attended(query, fresh, mask, cache, length):
            distance = ScoreRules.of(config, length[:, None] + DEPTH)
            return attend(query, fresh, mask, cache, length, distance)

        found = attended(query, fresh, mask, cache, length)
        for i, row in enumerate(rows):
            one = jax.tree.map(lambda x: np.asarray(x)[i], (query, fresh, cache))  # noqa: B023
            np.testing.assert_allclose(found[i], naive(*one, lengths[row], config), atol=1e-5)


@pytest.mark.parametrize(("window", "part"), [(2, 256), (257, 256), (258, 512), (513, 512)])
def test_a_gpu_reads_the_part_of_a_long_cache_that_a_window_shows(window, part, monkeypatch):
    monkeypatch.setitem(READ_POLICIES, "cpu", READ_POLICIES["cuda"])
    query, row = jnp.ones((2, 1, 1, 3, 4)), jnp.ones((2, 1, 3, 4))
    mask = jnp.ones((2, 3, 3), bool)

    def scored(size):
        """Return how many positions of the cache have scores."""
        cache, length = jnp.ones((2, 1, size, 4)), jnp.array([9, size])

        def attended(positions):
            rules = ScoreRules(positions, window)
            return attend(query, KeyValue(row, row), mask, KeyValue(cache, cache), length, rules)

        text = jax.jit(attended).lower(length[:, None] + jnp.arange(3)).as_text()
        return max(int(n) for n in re.findall(r"tensor<2x1x1x3x(\d+)xf32>", text))

    assert scored(3 * part) == part
    assert scored(3 * part - 256) == 3 * part - 256  # copying the part would move as much
