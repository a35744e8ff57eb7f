"""The most frequent tokens of the data, and those that are always kept."""

import numpy as np
import pytest

from clover_jax.data.records import TokenRow
from clover_jax.data.samples import RecordSamples
from clover_jax.errors import UserError
from clover_jax.training.setup import count_tokens, most_frequent


def test_only_what_the_base_is_imitated_on_is_counted():
    records = [TokenRow("a", (1, 2), (3, 3, 4)), TokenRow("b", (3,), (0,))]
    np.testing.assert_array_equal(
        count_tokens(RecordSamples(records, None, 6, 32), 6), [1, 0, 0, 2, 1, 0]
    )


def test_the_docstrings_example():
    vocabulary = most_frequent(np.array([5, 0, 3, 0, 9]), 3, [1])
    assert vocabulary.ids == (0, 1, 4)
    assert vocabulary.coverage == 14 / 17


def test_equally_frequent_tokens_come_in_order_and_none_twice():
    assert most_frequent(np.array([1, 2, 2, 2]), 2, [2, 2]).ids == (1, 2)
    assert most_frequent(np.array([0, 0, 0]), 3).ids == (0, 1, 2)
    assert most_frequent(np.array([0, 0]), 1).coverage == 0.0


@pytest.mark.parametrize("size", [2, 6])
def test_an_impossible_size_is_refused(size):
    message = rf"--draft_vocab={size} must lie between 3 \(the special tokens\) and 5, the base's"
    with pytest.raises(UserError, match=message):
        most_frequent(np.ones(5, np.int64), size, [0, 3, 4])
