"""Drafts without training: prompt lookup's matches and Token Recycling's table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Request
from clover_jax.decoding.state import EOS, empty_state, grow
from clover_jax.decoding.step import Weights, speculate_and_verify
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import recycle, registry
from clover_jax.drafters.drafter import PAD_TOKEN, AcceptedPositions
from clover_jax.drafters.lookup import CONTINUATIONS, REPEATS
from clover_jax.drafters.recycle import SUCCESSORS, remember
from clover_jax.drafters.text_matches import MOST_MATCHED, find_matches, known_text, last_tokens
from tests.tiny_models import TINY, random_base, random_prompts


def slow_matches(text, suffix, count):
    """Return (token, place, length) of the best matches, by comparing one position after another.

    suffix: the last tokens, oldest first.
    """
    found = []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, MOST_MATCHED, len(suffix)) and (
            text[place - 1 - length] == suffix[-1 - length]
        ):
            length += 1
        found.append((length, place))
    best = {}
    for length, place in sorted(found, reverse=True):
        if length and text[place] not in best:
            best[text[place]] = (text[place], place, length)
    return [*best.values()][:count]


def test_matches_are_those_of_a_slow_search():
    rng = np.random.default_rng(0)
    batch, size, count = 40, 60, 3
    text = rng.integers(0, 4, (batch, size))
    end = rng.integers(0, size, batch)
    end[0] = 0
    drafted = rng.integers(0, 4, (batch, 2))  # a branch that goes on after the text
    before = last_tokens(jnp.asarray(text), jnp.asarray(end))
    branch = np.concatenate([drafted[:, ::-1], before[:, :-2]], axis=1)
    suffixes = jnp.stack([before, jnp.asarray(branch)], axis=1)
    searched = known_text(jnp.asarray(text), jnp.asarray(end), None)
    found = find_matches(searched, jnp.asarray(end), suffixes, count)
    for row in range(batch):
        known = text[row, : end[row] + 1].tolist()
        for way, suffix in enumerate([known, known + drafted[row].tolist()]):
            expected = slow_matches(known, suffix, count)
            expected += [(PAD_TOKEN, 0, 0)] * (count - len(expected))
            ours = np.stack([found.token, found.place, found.length], axis=-1)[row, way]
            assert [tuple(match) for match in ours.tolist()] == expected


def propose(text):
    head = registry.head(registry.config_for_base("lookup", TINY))
    tokens, zero = jnp.asarray([text]), jnp.zeros(1, int)
    count = zero + len(text) - 1
    accepted = AcceptedPositions(jnp.zeros((1, 1, 0)), tokens[:, :1], zero, count, tokens)
    state, _ = head.module.apply({}, None, accepted, (), method="absorb")

    def follow(state, token, depth):
        arguments = (None, state, (), zero[:, None], jnp.array([[token]]), depth)
        return head.module.apply({}, *arguments, method="advance")

    return lambda state: head.module.apply({}, None, state, 0, method="propose"), state, follow


def test_what_followed_the_longest_match_comes_first():
    a, b, c, d, e = range(5)
    proposed, state, follow = propose([a, b, c, e, b, d, a, b])
    few = proposed(state)
    assert few.ids[0, 0].tolist() == [c, d] + [PAD_TOKEN] * (CONTINUATIONS - 2)
    first = REPEATS[2]
    second = (1 - first) * REPEATS[1]
    np.testing.assert_allclose(np.exp(few.log_probability[0, 0, :3]), [first, second, 0], atol=1e-6)
    # A drafted token is looked up as the text's own would be.
    assert proposed(follow(state, d, 1)).ids[0, 0, 0] == a
    assert (proposed(follow(state, 7, 1)).ids == PAD_TOKEN).all()


HEAD = registry.head(registry.config_for_base("recycle", TINY))
CHAIN = parse_tree("chain:3")


@functools.cache
def applied(method):
    return jax.jit(functools.partial(HEAD.module.apply, {}, method=method))


class SlowTable:
    """The lists of one row, kept by one pair after another."""

    def __init__(self, most):
        self.most, self.lists = most, {}

    def see(self, token, following):
        others = [each for each in self.lists.get(token, []) if each != following]
        self.lists[token] = [following, *others][: self.most]

    def array(self, vocabulary):
        lists = [self.lists.get(token, []) for token in range(vocabulary)]
        return [[*known, *[PAD_TOKEN] * (self.most - len(known))] for known in lists]


def test_the_table_is_that_of_one_pair_after_another():
    rng = np.random.default_rng(0)
    batch, most, vocabulary, pairs = 30, 3, 6, 12
    slow = [SlowTable(most) for _ in range(batch)]
    table = jnp.full((batch, most, vocabulary), PAD_TOKEN)
    learn = jax.jit(remember)
    for _ in range(5):
        tokens = rng.integers(0, vocabulary, (batch, pairs))
        following = rng.integers(0, 9, (batch, pairs))
        # An empty slot of a tree has no token; a row that has ended has one in all the same.
        valid = (rng.random((batch, pairs)) < 0.8) & (np.arange(batch) > 0)[:, None]
        given = np.where(valid | (rng.random(valid.shape) < 0.5), tokens, PAD_TOKEN)
        table = learn(table, jnp.asarray(given), jnp.asarray(following), jnp.asarray(valid))
        for row, place in np.argwhere(valid):
            slow[row].see(tokens[row, place], following[row, place])
        expected = [each.array(vocabulary) for each in slow]
        np.testing.assert_array_equal(table.swapaxes(1, 2), expected)
    assert (table[0] == PAD_TOKEN).all()


def absorb(texts, start, count, cache):
    """Read positions of texts, the last of `count` being followed by the root."""
    text = jnp.asarray(texts)
    size = text.shape[1] - 1 - start
    following = text[:, start + 1 :]
    starts = jnp.full(len(text), start)
    features = jnp.zeros((len(text), size, 0))
    accepted = AcceptedPositions(features, following, starts, jnp.asarray(count), text)
    return applied("absorb")(None, accepted, cache)


def test_a_prompt_read_in_parts_is_the_prompt_read_at_once():
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 7, (4, 40))
    empty = HEAD.module.init_cache(4, 40, jnp.float32)
    _, whole = absorb(texts, 0, [39] * 4, empty)
    _, half = absorb(texts[:, :21], 0, [20] * 4, empty)
    state, parts = absorb(texts, 20, [19] * 4, half)
    np.testing.assert_array_equal(parts, whole)
    for row, text in enumerate(texts):
        slow = SlowTable(SUCCESSORS)
        for pair in itertools.pairwise(text):
            slow.see(*pair)
        lists = slow.array(TINY.vocab_size)
        np.testing.assert_array_equal(whole[row].T, lists)
        np.testing.assert_array_equal(state[row, 0], lists[text[-1]])


def test_the_successor_seen_last_comes_first():
    a, b, c, d, e = range(5)
    _, cache = absorb([[a, b, c, a, d, a]], 0, [5], HEAD.module.init_cache(1, 6, jnp.float32))
    # The verified tree: a root a with b and an empty slot; the base says e after a and c after b.
    tokens, choices = jnp.array([[a, b, PAD_TOKEN]]), jnp.array([[e, c, d]])
    cache = applied("observe")(cache, tokens, choices, tokens != PAD_TOKEN)
    state = applied("advance")(None, None, cache, None, jnp.array([[a, b, e, PAD_TOKEN]]), 1)
    few = applied("propose")(None, state, 1)
    known = few.ids[0, :, :4].tolist()
    none = PAD_TOKEN
    assert known == [[e, d, b, none], [c, none, none, none], [none] * 4, [none] * 4]
    np.testing.assert_allclose(
        np.exp(few.log_probability[0, 0, :4]), [*recycle.REPEATS[:3], 0], rtol=1e-6
    )
    np.testing.assert_array_equal(few.log_probability == -jnp.inf, few.ids == PAD_TOKEN)


def test_the_table_keeps_its_size_where_the_text_grows():
    def state_of(kind):
        head = registry.head(registry.config_for_base(kind, TINY))
        return empty_state(TINY, head, CHAIN, 1, 64, 1, jnp.float32)

    table = grow(state_of("recycle"), 128).draft_cache
    assert table.shape == (1, SUCCESSORS, TINY.vocab_size)
    assert (table == PAD_TOKEN).all()
    assert grow(state_of("eagle"), 128).draft_cache[0].key.shape[2] == 128


@pytest.fixture(scope="module")
def two_rows():
    """Return a state of two rows that have read their prompts, and the step."""
    engine = Engine(TINY, HEAD, CHAIN, batch_size=2)
    requests = [Request(i, prompt, 30) for i, prompt in enumerate(random_prompts(2))]
    step = jax.jit(functools.partial(speculate_and_verify, engine.config))
    weights = Weights(random_base(), {})
    return engine.prefilled(random_base(), {}, requests), functools.partial(step, weights)


def test_rows_that_have_ended_learn_nothing(two_rows):
    state, step = two_rows
    # The first row has ended, and nothing of it waits for the head.
    state = state.replace(finish=state.finish.at[0].set(EOS), count=state.count.at[0].set(0))
    new, _ = step(state)
    changed = (new.draft_cache != state.draft_cache).any(axis=(1, 2))
    assert changed.tolist() == [False, True]


def test_rejected_slots_teach_what_the_base_says_after_them(two_rows):
    state, step = two_rows
    # A token that the text does not have is drafted, and what the base puts after it is learned.
    root, known = int(state.tokens[0, state.length[0]]), state.tokens[0, : state.end[0]].tolist()
    other = next(token for token in range(TINY.vocab_size) if token not in known)
    table = state.draft_cache.at[0, 0, root].set(other)
    new, record = step(state.replace(draft_cache=table))
    assert record.accepted[0] == 0
    assert (table[0, :, other] == PAD_TOKEN).all()
    assert new.draft_cache[0, 0, other] != PAD_TOKEN
    # The base's own token comes before the one that was wrong.
    bonus = new.tokens[0, new.length[0]]
    assert new.draft_cache[0, :2, root].tolist() == [bonus, other]
