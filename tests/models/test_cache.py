"""Rows of a cache: which are taken, whatever the platform takes them by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.cache import (
    KeyValue,
    _by_index,
    _by_product,
    _write_at_once,
    _write_one_by_one,
    gather_rows,
)


def test_gather_rows_of_the_docstring():
    rows = jnp.arange(3.0)[None, None, :, None]
    found = gather_rows((KeyValue(rows, -rows),), jnp.array([[0, 2]]))
    assert found[0].key.ravel().tolist() == [0, 2]
    assert found[0].value.ravel().tolist() == [0, -2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_takes_the_very_rows_that_an_index_does(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    fresh = tuple(KeyValue(x, x[::-1]) for x in jax.random.normal(keys[0], (2, 3, 2, 7, 5), dtype))
    index = jax.random.randint(keys[1], (3, 4), 0, 7)
    jax.tree.map(np.testing.assert_array_equal, _by_product(fresh, index), _by_index(fresh, index))


def test_slots_that_are_not_asked_for_do_not_matter():
    rows = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])[None, None, :, None]
    index = jnp.array([[0, 2]])
    assert _by_product((KeyValue(rows, rows),), index)[0].key.ravel().tolist() == [1, 3]


@pytest.mark.parametrize(("count", "flat"), [(1, True), (1, False), (3, False)])
def test_rows_written_one_by_one_are_those_written_at_once(count, flat):
    buffer, new = jnp.arange(96.0).reshape(2, 3, 8, 2), -jnp.ones((2, 3, count, 2)).cumsum(axis=1)
    start = jnp.array([5, 0])
    written = _write_one_by_one(buffer, new, start, flat)
    np.testing.assert_array_equal(written, _write_at_once(buffer, new, start))
