import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.training.heads import make_loss
from clover_jax.training.losses import distillation_loss
from clover_jax.training.pairs import among_likely, likely_next, pair_mask
from clover_jax.training.settings import TrainSettings
from tests.tiny_models import TINY, random_base, random_head
from tests.training.reference import plain_loss
from tests.training.training_data import random_batch, random_states

POSITIONS = 3


def naive_likely(p, tokens):
    """Return [b][s] by the definition, one position after the other."""
    rows, size = tokens.shape
    result = np.zeros((rows, size), bool)
    for b in range(rows):
        for s in range(size - 1):
            mass = 0.0
            for token in np.argsort(-p[b, s], kind="stable")[:8]:
                if mass <= 0.8 and token == tokens[b, s + 1]:
                    result[b, s] = True
                mass += p[b, s, token]
    return result


def naive_pairs(likely, batch):
    """Return [i][b][t] whether the pair (t, i) counts."""
    segment, mask = np.asarray(batch.segment_ids), np.asarray(batch.loss_mask)
    rows, size = segment.shape
    counts = np.zeros((POSITIONS, rows, size), bool)
    for i in range(POSITIONS):
        for b in range(rows):
            for t in range(size - 1 - i):
                together = segment[b, t] == segment[b, t + 1 + i] > 0
                went = all(likely[b, t + j] for j in range(i + 1))
                counts[i, b, t] = together and mask[b, t + i] and went
    return counts


@pytest.fixture(scope="module")
def case():
    """Peaked states, and a text that mostly goes where the base would go."""
    base = random_base(TINY)
    batch = random_batch(rows=3, size=20, seed=1)
    frozen, hidden, states = random_states(base, batch, POSITIONS)
    states = 10 * states
    p = np.asarray(jax.nn.softmax(jnp.einsum("bsd,vd->bsv", states, frozen.lm_head)), np.float64)
    rng, tokens = np.random.default_rng(0), np.array(batch.tokens)
    for b, s in np.ndindex(3, 19):
        rank = rng.choice([0, 0, 0, 1, 2, 5, 12])
        tokens[b, s + 1] = np.argsort(-p[b, s])[rank]
    return batch.replace(tokens=jnp.asarray(tokens)), frozen, hidden, states, p


def test_the_docstrings_example():
    logits = jnp.log(jnp.array([0.5, 0.4, 0.1]))
    assert [bool(among_likely(logits, token)) for token in range(3)] == [True, True, False]


def test_at_most_eight_candidates_count():
    logits = -jnp.arange(12) * 1e-3
    assert [bool(among_likely(logits, token)) for token in range(12)] == [True] * 8 + [False] * 4
    alike = jnp.zeros(12)  # the lower numbers go first
    assert [bool(among_likely(alike, token)) for token in range(12)] == [True] * 8 + [False] * 4


@pytest.mark.parametrize(("chunk", "groups"), [(7, 1), (64, 1), (7, 3)])
def test_likely_tokens_are_those_of_the_definition(case, chunk, groups):
    batch, frozen, _, states, p = case
    likely = jax.jit(likely_next, static_argnums=(3, 4))
    found = np.asarray(likely(frozen.lm_head, states, batch.tokens, chunk, groups))[:, :-1]
    expected = naive_likely(p, np.asarray(batch.tokens))[:, :-1]
    np.testing.assert_array_equal(found, expected)
    assert 0.2 < expected.mean() < 0.9


def test_pairs_are_those_of_the_definition(case):
    batch, _, _, _, p = case
    likely = naive_likely(p, np.asarray(batch.tokens))
    masks = pair_mask(batch.segment_ids, batch.loss_mask, POSITIONS, jnp.asarray(likely))
    expected = naive_pairs(likely, batch)
    for i in range(POSITIONS):
        # Ours are named by their target, t + 1 + i.
        by_target = np.roll(expected[i], i + 1, axis=1)
        np.testing.assert_array_equal(np.asarray(masks[i]), by_target)
    assert expected.sum() < naive_pairs(np.ones_like(likely), batch).sum()


def test_the_loss_and_its_divisor_are_those_of_the_plain_computation(case):
    batch, frozen, hidden, states, p = case
    head, params = random_head(TINY)
    loss_spec = dataclasses.replace(head.config.loss, lk=1.0, dpace=0.5, label_mask=True)
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, loss=loss_spec))
    arrays = (params, frozen, hidden, states, batch)
    loss, parts = jax.jit(functools.partial(distillation_loss, head, chunk=7))(*arrays)
    plain, terms = jax.jit(functools.partial(plain_loss, head))(*arrays)
    np.testing.assert_allclose(loss, plain, rtol=1e-5)
    np.testing.assert_array_equal(parts.pairs, terms["pairs"])
    expected = naive_pairs(naive_likely(p, np.asarray(batch.tokens)), batch)
    np.testing.assert_array_equal(parts.pairs, expected.sum(axis=(1, 2)))


def test_the_flag_reaches_the_loss():
    head, _ = random_head(TINY)
    assert not head.config.loss.label_mask
    assert make_loss(TrainSettings(label_mask=True), head.config.loss).label_mask
    masked = dataclasses.replace(head.config.loss, label_mask=True)
    assert make_loss(TrainSettings(), masked).label_mask


def test_frozen_matrices_get_no_gradient_from_the_mask(case):
    batch, _, hidden, states, _ = case
    head, params = random_head(TINY)
    spec = dataclasses.replace(head.config.loss, lk=1.0, dpace=0.5, label_mask=True)
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, loss=spec))
    frozen = frozen_from_base(random_base(TINY))
    gradient = jax.jit(
        jax.grad(lambda u: distillation_loss(head, params, frozen, u, states, batch, 16)[0])
    )(hidden)
    assert np.isfinite(np.asarray(gradient)).all()
    assert np.abs(np.asarray(gradient)).max() > 0
