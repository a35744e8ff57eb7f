import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.top_k import _chunk_of, argmax, top_k


@pytest.mark.parametrize("vocabulary", [50, 4096, 5000, 32_000])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_two_stages_give_what_one_gives_ties_included(vocabulary, k):
    # Few distinct values, so that most of the largest are ties.
    logits = jax.random.randint(jax.random.key(0), (2, 3, vocabulary), 0, 40).astype(jnp.float32)
    expected_values, expected_ids = jax.lax.top_k(logits, k)
    values, ids = top_k(logits, k)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(ids, expected_ids)


def test_chunks_come_out_even_where_they_can():
    assert [_chunk_of(size) for size in (128256, 4097, 32000, 4096)] == [1336, 1024, 1280, 1024]


def test_argmax_takes_the_lowest_id_among_equals():
    np.testing.assert_array_equal(argmax(jnp.array([[1.0, 3.0, 3.0]])), [1])


def test_padding_is_never_chosen():
    logits = jnp.full((1, 4097), -1e30).at[0, 4096].set(-1e31)
    assert sorted(top_k(logits, 3).ids[0].tolist()) == [0, 1, 2]
