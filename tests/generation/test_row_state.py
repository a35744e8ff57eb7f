"""How many forwards a number of tokens took."""

import pytest

from clover_jax.decoding.requests import Generation
from clover_jax.generation.row_state import copied_parts, forwards_until


@pytest.mark.parametrize(
    ("num_tokens", "forwards"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (6, 3)]
)
def test_forwards_until_is_as_in_its_example(num_tokens, forwards):
    assert forwards_until([2, 0, 3], num_tokens) == forwards


def test_copied_parts_are_as_in_their_example():
    row = Generation(0, [1], [], accepted=[0, 3], copied=[0, 2])
    assert copied_parts(row, 2, [5, 6, 7, 8]) == [([5], False), ([6, 7], True), ([8], False)]
    assert copied_parts(row, 2, [5, 6]) == [([5], False), ([6], True)]  # cut by a limit
    assert copied_parts(row, 1, [5]) == copied_parts(row, 0, [5]) == [([5], False)]


def test_a_cut_at_the_limit_counts_all_forwards():
    assert forwards_until([2, 0, 3], 9) == 3
