"""Prompt lookup: which matches it finds, and what it proposes of them."""

import jax.numpy as jnp
import numpy as np

from clover_jax.drafters import registry
from clover_jax.drafters.drafter import PAD_TOKEN, AcceptedPositions
from clover_jax.drafters.lookup import CONTINUATIONS, REPEATS
from clover_jax.drafters.text_matches import MOST_MATCHED, find_matches, known_text, last_tokens
from tests.tiny_models import TINY


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
