"""The base's choices: one product, or one part of the vocabulary after the other."""

import jax
import jax.numpy as jnp

from clover_jax.decoding import step
from clover_jax.decoding.step import largest, largest_in_parts


def test_parts_of_the_vocabulary_give_the_same_choices(monkeypatch):
    monkeypatch.setattr(step, "MOST_LOGITS", 1024)
    matrix = jax.random.normal(jax.random.key(0), (2500, 16))  # the last part is a shorter one
    hidden = jax.random.normal(jax.random.key(1), (3, 40, 16))
    found = largest_in_parts(matrix, hidden)
    assert found.shape == (3, 40)
    assert (found == largest(matrix, hidden)).all()
    assert len(set((found // 1024).ravel().tolist())) == 3  # every part wins somewhere


def test_the_lowest_of_equal_tokens_is_chosen_over_parts(monkeypatch):
    monkeypatch.setattr(step, "MOST_LOGITS", 1024)
    matrix = jnp.zeros((3000, 4)).at[jnp.array([7, 1030, 2900]), 0].set(1.0)
    hidden = jnp.zeros((5, 4)).at[:, 0].set(1.0)
    assert largest_in_parts(matrix, hidden).tolist() == [7] * 5
