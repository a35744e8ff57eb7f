"""The kernel, interpreted, sums up what XLA's reading does: any lengths, windows and caps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.attention import RunningSoftmax, attend, finish
from clover_jax.models.attention_kernel import BLOCK, MOST_QUERIES, _blocks, read_cache
from clover_jax.models.cache import KeyValue
from clover_jax.models.score_rules import ScoreRules

LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}  # of values near 1


def arrays(dtype, groups, slots, heads=2, size=2 * BLOCK, lengths=LENGTHS):
    """Return queries, fresh rows, a tree's mask, a cache and its lengths."""
    keys = iter(jax.random.split(jax.random.key(slots), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape).astype(dtype)

    batch = len(lengths)
    query = normal(batch, heads, groups, slots, 16)
    fresh = KeyValue(normal(batch, heads, slots, 16), normal(batch, heads, slots, 16))
    cache = KeyValue(normal(batch, heads, size, 16), normal(batch, heads, size, 16))
    # Each slot sees itself and some that came before it, as in a tree.
    seen = jax.random.bernoulli(next(keys), 0.5, (batch, slots, slots))
    mask = jnp.tril(seen) | jnp.eye(slots, dtype=bool)
    return query, fresh, mask, cache, jnp.array(lengths)


def by_kernel(query, cache, length, rules):
    positions, window = (None, None) if rules is None else (rules.positions, rules.window)
    return read_cache(query, cache, length, positions, window=window, interpret=True)


def with_kernel(given):
    """Return the arguments of `attend` with a cache that the kernel reads."""
    return (*given[:3], given[3].replace(reader=by_kernel), *given[4:])


@pytest.mark.parametrize(
    ("dtype", "groups", "slots", "window"),
    [
        ("float32", 3, 7, None),
        ("float32", 3, 7, 5),
        ("float32", 1, 1, BLOCK + 3),
        ("bfloat16", 1, 1, None),
        ("bfloat16", 3, 7, BLOCK + 3),
    ],
)
def test_the_kernel_gives_the_attention_that_xla_gives(dtype, groups, slots, window):
    given = arrays(dtype, groups, slots)
    depth = given[2].sum(axis=2) - 1
    rules = None if window is None else ScoreRules(given[-1][:, None] + depth, window)
    wanted = attend(*given, rules).astype(jnp.float32)
    result = attend(*with_kernel(given), rules).astype(jnp.float32)
    np.testing.assert_allclose(result, wanted, atol=ROUNDING[dtype])


def test_a_row_without_committed_positions_adds_nothing():
    query, _, _, cache, _ = arrays("float32", 2, 3, lengths=(0,))
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    softmax = read_cache(query, spoilt, jnp.array([0]), interpret=True)
    assert float(jnp.abs(softmax.total).max()) == float(jnp.abs(softmax.mixed).max()) == 0


def test_scores_have_the_scale_and_the_soft_cap_that_are_asked_for():
    query, _, _, cache, length = arrays("float32", 2, 3, lengths=(1, BLOCK))
    softmax = read_cache(query, cache, length, scale=0.7, cap=1.5, interpret=True)
    scores = 1.5 * jnp.tanh(0.7 * jnp.einsum("bkgth,bksh->bkgts", query, cache.key) / 1.5)
    live = jnp.arange(cache.key.shape[2]) < length[:, None, None, None, None]
    weight = jax.nn.softmax(jnp.where(live, scores, -jnp.inf), axis=-1)
    wanted = jnp.einsum("bkgts,bksh->bkgth", weight, cache.value)
    np.testing.assert_allclose(finish(softmax, jnp.float32), wanted, atol=2e-6)


def test_many_queries_are_read_in_parts_of_heads_and_of_queries():
    # (heads, queries of a head, positions) -> (positions, heads and queries at a time)
    assert _blocks(8, 4 * 26, 2560, 128, 2) == (BLOCK, 8, 104)
    assert _blocks(8, 4 * 65, 2304, 128, 2) == (BLOCK // 2, 8, 260)
    assert _blocks(32, 26, 2560, 128, 2) == (BLOCK, 16, 26)
    assert _blocks(8, 4 * 256, 2560, 128, 2) == (BLOCK, 4, MOST_QUERIES)
    assert _blocks(8, 4 * 512, 2560, 128, 4) == (BLOCK, 4, MOST_QUERIES // 2)
    assert _blocks(2, 5, 100, 16, 4) == (100, 2, 5)


@pytest.mark.slow
def test_a_long_chunk_of_a_prompt_is_read_in_parts():
    given = arrays("float32", 3, 1024, lengths=(0, 700))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((1024, 1024), bool)), given[2].shape)
    rules = ScoreRules(given[-1][:, None] + jnp.arange(1024), 600)
    given = (*given[:2], mask, *given[3:], rules)
    result = attend(*with_kernel(given))
    np.testing.assert_allclose(result, attend(*given), atol=3e-6)


def test_the_sums_are_partial():
    query, _, _, cache, _ = arrays("float32", 1, 2, lengths=(9,))
    softmax = read_cache(query, cache, jnp.array([9]), interpret=True)
    assert isinstance(softmax, RunningSoftmax)
    scores = jnp.einsum("bkgth,bksh->bkgts", query, cache.key)[..., :9] / 4
    np.testing.assert_allclose(softmax.peak, scores.max(axis=-1), rtol=1e-5)
    total = jnp.exp(scores - softmax.peak[..., None]).sum(axis=-1)
    np.testing.assert_allclose(softmax.total, total, rtol=1e-5)
