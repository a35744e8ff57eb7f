"""The definitions of tau and of hit rates, counted by hand."""

import pytest

from clover_jax.decoding.requests import AcceptedLengths


def tally(*answers):
    lengths = AcceptedLengths()
    for num_tokens, accepted in answers:
        lengths.add(num_tokens, accepted)
    return lengths


def test_tau_counts_what_is_left_after_the_cut_and_hit_rates_what_came_before_it():
    # 1 + (2+1) + (0+1) + (3+1) tokens, the last forward cut by one.
    lengths = tally((8, [2, 0, 3]))
    assert lengths.tau == pytest.approx(7 / 3)
    assert 1 + sum(lengths.hit_rate(3)) == pytest.approx(8 / 3)


def test_rates_of_several_answers_are_those_of_all_their_forwards():
    lengths = tally((9, [2, 0, 3]), (3, [1]))
    assert (lengths.tokens, lengths.forwards) == (12, 4)
    assert lengths.hit_rate(4) == [3 / 4, 2 / 4, 1 / 4, 0]
    assert lengths.conditional_hit_rate(4) == [3 / 4, 2 / 3, 1 / 2, 0]
    assert lengths.histogram() == [1, 1, 1, 1]
    assert lengths.histogram(1) == [1, 1]


def test_nothing_decoded_has_no_rates():
    lengths = tally((1, []))
    assert (lengths.tau, lengths.hit_rate(2), lengths.histogram()) == (None, [], [])
    assert lengths.conditional_hit_rate(2) == [None, None]
