"""Products with rounded matrices, and the largest of many logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.int8 import contract, quantize, take_rows, widen
from clover_jax.models.top_k import _chunk_of, argmax, top_k


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_every_entry_is_within_half_a_step_and_the_largest_is_127_of_them():
    matrix = random(5, 3, 7).at[:, 1, 2].set(0.0)
    rounded = quantize(matrix, (0,))
    assert rounded.values.dtype == jnp.int8
    assert rounded.step.shape == (1, 3, 7)
    assert (jnp.abs(widen(rounded, jnp.float32) - matrix) <= 0.5001 * rounded.step).all()
    largest = jnp.abs(rounded.values.astype(int)).max(axis=0)
    expected = np.full((3, 7), 127)
    expected[1, 2] = 0  # a channel of zeros stays zero
    np.testing.assert_array_equal(largest, expected)
    # A matrix of 127 steps is kept as it is.
    values = np.random.default_rng(0).integers(-127, 128, (64, 3))
    values[0] = 127
    matrix = jnp.asarray(values * np.array([0.5, 2.0, 1.0]), jnp.float32)
    assert (widen(quantize(matrix, (0,)), jnp.float32) == matrix).all()


@pytest.mark.parametrize(
    ("spec", "shapes", "inputs"),
    [
        ("btd,dkch->bkcth", ((2, 3, 8), (8, 2, 4, 5)), (0,)),
        ("btd,dn->btn", ((2, 3, 8), (8, 6)), (0,)),
        ("btd,dcf->btcf", ((2, 3, 8), (8, 2, 6)), (0,)),
        ("rd,vd->rv", ((3, 8), (9, 8)), (1,)),
        ("...d,dcnh->...cnh", ((2, 3, 8), (8, 2, 4, 2)), (0,)),
        ("...fd,fde->...e", ((3, 2, 8), (2, 8, 6)), (0, 1)),
    ],
)
def test_a_product_is_that_of_what_the_matrix_stands_for(spec, shapes, inputs):
    x, matrix = random(*shapes[0], seed=1), random(*shapes[1], seed=2)
    rounded = quantize(matrix, inputs)
    expected = jnp.einsum(spec, x, widen(rounded, jnp.float32))
    np.testing.assert_allclose(contract(spec, x, rounded), expected, rtol=1e-5, atol=1e-5)
    assert contract(spec, x.astype(jnp.bfloat16), rounded).dtype == jnp.bfloat16
    assert contract(spec, x.astype(jnp.bfloat16), rounded, jnp.float32).dtype == jnp.float32


def test_parts_flattening_and_rows_are_those_of_what_it_stands_for():
    def check(part, expected):
        np.testing.assert_array_equal(widen(part, jnp.float32), expected)

    stack, own = (quantize(random(2, 8, 6), inputs) for inputs in ((0, 1), (1,)))
    for matrix in (stack, own):
        check(matrix[1], widen(matrix, jnp.float32)[1])
    check(stack.reshape(-1, 6), widen(stack, jnp.float32).reshape(-1, 6))
    rows = quantize(random(9, 4), (1,))
    check(rows[2:5], widen(rows, jnp.float32)[2:5])
    ids = jnp.array([[3, 0], [8, 3]])
    check(take_rows(rows, ids), widen(rows, jnp.float32)[ids])
    x = random(5, 8)
    np.testing.assert_allclose(x @ own[0], x @ widen(own[0], jnp.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [50, 4096, 5000, 32_000])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_two_stages_give_what_one_gives_ties_included(vocabulary, k):
    # Few distinct values, so that most of the largest are ties.
    logits = jax.random.randint(jax.random.key(0), (2, 3, vocabulary), 0, 40).astype(jnp.float32)
    expected_values, expected_ids = jax.lax.top_k(logits, k)
    values, ids = top_k(logits, k)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(ids, expected_ids)


def test_chunks_come_out_even_and_padding_is_never_chosen_but_the_lowest_id_among_equals():
    assert [_chunk_of(size) for size in (128256, 4097, 32000, 4096)] == [1336, 1024, 1280, 1024]
    np.testing.assert_array_equal(argmax(jnp.array([[1.0, 3.0, 3.0]])), [1])
    logits = jnp.full((1, 4097), -1e30).at[0, 4096].set(-1e31)
    assert sorted(top_k(logits, 3).ids[0].tolist()) == [0, 1, 2]
