"""Attention over a cache: every policy and kernel gives the same, with windows, caps and ALiBi."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import LayerConfig
from clover_jax.decoding.cache_reading import read_by_cudnn
from clover_jax.models.attention import (
    CACHE_CHUNK,
    READ_POLICIES,
    CacheReadPolicy,
    RunningSoftmax,
    attend,
    finish,
)
from clover_jax.models.attention_kernel import BLOCK, MOST_QUERIES, _blocks, read_cache
from clover_jax.models.cache import (
    KeyValue,
    _by_index,
    _by_product,
    _write_at_once,
    _write_one_by_one,
    gather_rows,
)
from clover_jax.models.layers import quarter_turn, quarter_turn_by_product
from clover_jax.models.score_rules import ScoreRules, alibi_slopes

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
    for most, chunk in ((10**6, 5120), (4096, 2560)):
        assert CacheReadPolicy(most_scores=4 * most).chunk_of(10240, num_queries=1) == chunk
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
    rows, one = jnp.zeros((1, 1, 300, 8)), jnp.zeros((1, 1, 1, 8))
    given = one[:, :, None], KeyValue(one, one), jnp.ones((1, 1, 1), bool), KeyValue(rows, rows)
    with pytest.raises(ValueError, match=r"cache length \(300\) must be a multiple of 256"):
        attend(*given, jnp.array([1]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_pairs", [8, 6])
def test_a_product_turns_heads_exactly(dtype, num_pairs):
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 16)).astype(dtype)
    turned = quarter_turn(x, num_pairs)
    np.testing.assert_array_equal(quarter_turn_by_product(x, num_pairs), turned)
    np.testing.assert_array_equal(turned[..., num_pairs : 2 * num_pairs], x[..., :num_pairs])
    assert not turned[..., 2 * num_pairs :].any()


def test_rows_of_any_length_are_read_as_xla_reads_them():
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape):
        return jax.random.normal(next(keys), (3, 2, *shape))

    query, fresh = normal(4, 7, 16), KeyValue(normal(7, 16), normal(7, 16))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((7, 7), bool)), (3, 7, 7))
    # What lies beyond a row's end must not matter, nor anything of a row without one.
    length, cache = jnp.array([0, 1, 512]), KeyValue(normal(512, 16), normal(512, 16))
    cache = jax.tree.map(lambda x: x.at[:2, :, 1:].set(1e4), cache)

    by_xla = attend(query, fresh, mask, cache, length)
    cache = cache.replace(reader=lambda *given: read_by_cudnn(*given[:3], implementation="xla"))
    by_kernel = attend(query, fresh, mask, cache, length)
    np.testing.assert_allclose(by_kernel, by_xla, atol=1e-6)


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


LAYER = LayerConfig(hidden_size=12, intermediate_size=8, num_heads=6, num_kv_heads=3, head_dim=4)
# A tree after the committed text: the root, two children, a grandchild under the first.
PARENT_MASK = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
DEPTH = np.array([0, 1, 1, 2])


def test_the_docstrings_slopes():
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]


def test_a_layer_without_rules_and_a_window_as_large_as_the_span_cost_nothing():
    assert ScoreRules.of(LAYER, jnp.zeros((1, 2), jnp.int32)) is None
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


def test_gather_rows_of_the_docstring():
    rows = jnp.arange(3.0)[None, None, :, None]
    found = gather_rows((KeyValue(rows, -rows),), jnp.array([[0, 2]]))
    assert found[0].key.ravel().tolist() == [0, 2]
    assert found[0].value.ravel().tolist() == [0, -2]
    # Slots that are not asked for do not matter.
    rows = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])[None, None, :, None]
    index = jnp.array([[0, 2]])
    assert _by_product((KeyValue(rows, rows),), index)[0].key.ravel().tolist() == [1, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_takes_the_very_rows_that_an_index_does(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    fresh = tuple(KeyValue(x, x[::-1]) for x in jax.random.normal(keys[0], (2, 3, 2, 7, 5), dtype))
    index = jax.random.randint(keys[1], (3, 4), 0, 7)
    jax.tree.map(np.testing.assert_array_equal, _by_product(fresh, index), _by_index(fresh, index))


@pytest.mark.parametrize(("count", "flat"), [(1, True), (1, False), (3, False)])
def test_rows_written_one_by_one_are_those_written_at_once(count, flat):
    buffer, new = jnp.arange(96.0).reshape(2, 3, 8, 2), -jnp.ones((2, 3, count, 2)).cumsum(axis=1)
    start = jnp.array([5, 0])
    written = _write_one_by_one(buffer, new, start, flat)
    np.testing.assert_array_equal(written, _write_at_once(buffer, new, start))
