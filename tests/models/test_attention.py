"""Attention over a cache: every platform's way of policy it gives the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.attention import CACHE_CHUNK, READ_POLICIES, CacheReadPolicy, attend
from clover_jax.models.cache import KeyValue
from clover_jax.models.layers import quarter_turn, quarter_turn_by_product

FEW_SCORES = {
    f"{name}, few scores": dataclasses.replace(READ_POLICIES[name], most_scores=2**17)
    for name in ("cuda", "tpu")
}
ROW_BY_ROW = {"cuda, row by row": dataclasses.replace(READ_POLICIES["cuda"], rows_scores=1)}
EVERY = READ_POLICIES | FEW_SCORES | ROW_BY_ROW


def plain(query, fresh, mask, cache, length):
    """Return one softmax over the cache and the fresh rows, laid side by side."""
    key, value = (jnp.concatenate(pair, axis=2) for pair in zip(cache, fresh, strict=True))
    live = jnp.arange(cache[0].shape[2]) < length[:, None, None]
    seen = jnp.concatenate([jnp.broadcast_to(live, (*mask.shape[:2], live.shape[2])), mask], axis=2)
    scores = jnp.einsum("bkgth,bksh->bkgts", query, key) * query.shape[-1] ** -0.5
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bksh->bkgth", weight, value)


@pytest.mark.parametrize("policy", EVERY.values(), ids=EVERY)
def test_every_reading_of_a_cache_gives_one_softmax(monkeypatch, policy):
    monkeypatch.setitem(READ_POLICIES, "cpu", policy)
    keys = iter(jax.random.split(jax.random.key(0), 5))
    query = jax.random.normal(next(keys), (3, 2, 3, 4, 8))
    fresh = [jax.random.normal(next(keys), (3, 2, 4, 8)) for _ in range(2)]
    cache = [jax.random.normal(next(keys), (3, 2, 1024, 8)) for _ in range(2)]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (3, 4, 4))
    length = jnp.array([3, 700, 0])
    found = attend(query, KeyValue(*fresh), mask, KeyValue(*cache), length)
    np.testing.assert_allclose(found, plain(query, fresh, mask, cache, length), atol=2e-6)


def test_a_reading_takes_what_its_scores_allow():
    policy = CacheReadPolicy(most_scores=4 * 100 * 1024, stops_early=False)
    assert policy.chunk_of(1024, num_queries=100) == 1024
    assert policy.chunk_of(1024, num_queries=101) == 512
    assert policy.chunk_of(4096, num_queries=10**6) == CACHE_CHUNK
    assert CacheReadPolicy(most_scores=2**30).chunk_of(1024, num_queries=1) == 512
    assert CacheReadPolicy(most_scores=2**30).chunk_of(256, num_queries=1) == 256
    assert CacheReadPolicy().chunk_of(4096, num_queries=1) == CACHE_CHUNK
    # Five quarters of a power of two have other parts than halves.
    chunks = [
        CacheReadPolicy(most_scores=4 * most).chunk_of(10240, num_queries=1)
        for most in (10**6, 4096)
    ]
    assert chunks == [5120, 2560]
    assert READ_POLICIES["tpu"].chunk_of(10240, num_queries=16 * 32 * 26) == 512
    assert READ_POLICIES["tpu"].chunk_of(1280, num_queries=1) == CACHE_CHUNK
    assert CacheReadPolicy().chunk_of(100, num_queries=1) == 100


def test_rows_are_read_in_groups_as_large_as_their_scores_allow():
    policy = CacheReadPolicy(rows_scores=4 * 100 * 5)
    assert policy.rows_at_once(batch=16, scores_of_row=100) == 5
    assert policy.rows_at_once(batch=3, scores_of_row=100) == 3
    assert policy.rows_at_once(batch=16, scores_of_row=10**6) == 1
    assert CacheReadPolicy().rows_at_once(batch=16, scores_of_row=10**6) == 16


def test_a_cache_of_no_whole_chunks_is_refused():
    with pytest.raises(ValueError, match=r"cache length \(300\) must be a multiple of 256"):
        rows = KeyValue(jnp.zeros((1, 1, 300, 8)), jnp.zeros((1, 1, 300, 8)))
        fresh = KeyValue(jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 1, 1, 8)))
        mask = jnp.ones((1, 1, 1), bool)
        attend(jnp.zeros((1, 1, 1, 1, 8)), fresh, mask, rows, jnp.array([1]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_pairs", [8, 6])
def test_a_product_turns_heads_exactly(dtype, num_pairs):
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 16)).astype(dtype)
    turned = quarter_turn(x, num_pairs)
    np.testing.assert_array_equal(quarter_turn_by_product(x, num_pairs), turned)
    np.testing.assert_array_equal(turned[..., num_pairs : 2 * num_pairs], x[..., :num_pairs])
    assert not turned[..., 2 * num_pairs :].any()
