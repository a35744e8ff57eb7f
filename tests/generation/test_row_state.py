"""How many forwards a number of tokens took."""

import pytest

from clover_jax.generation.row_state import forwards_until


@pytest.mark.parametrize(
    ("num_tokens", "forwards"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (6, 3)]
)
def test_forwards_until_is_as_in_its_example(num_tokens, forwards):
    assert forwards_until([2, 0, 3], num_tokens) == forwards


def test_a_cut_at_the_limit_counts_all_forwards():
    assert forwards_until([2, 0, 3], 9) == 3
