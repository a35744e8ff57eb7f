"""What a trial decides, with given numbers and a given clock."""

import pytest

from clover_jax.tree_search.tree_trial import (
    Leg,
    SpeedUp,
    Trial,
    describe,
    fastest,
    run_in_turns,
    speed_up,
)

PLAIN = Trial((20.0, 10.0), 1.0)


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_speed_up_of_the_docstring():
    found = speed_up(Trial((30.0, 12.0), 2.0), PLAIN)
    assert (found.median, found.least, found.most) == pytest.approx((1.35, 1.2, 1.5))


def test_a_slow_round_slows_both_and_changes_nothing():
    found = speed_up(Trial((30.0, 15.0), 2.0), PLAIN)
    assert (found.least, found.most) == (1.5, 1.5)


def test_a_gain_within_the_spread_is_none():
    wide, narrow = SpeedUp(1.5, 0.9, 2.0), SpeedUp(1.2, 1.1, 1.3)
    assert fastest([wide, narrow]) == 1
    assert fastest([wide]) is None
    assert fastest([]) is None
    assert fastest([narrow, SpeedUp(1.3, 1.05, 1.4)]) == 1


def test_legs_take_turns_after_one_to_compile_and_who_begins_rotates():
    clock, order = Clock(), []

    def leg(name, seconds, tokens):
        def run():
            order.append(name)
            clock.now += seconds if len(order) > 2 else 100.0
            return Leg(tokens, forwards=10)

        return run

    found = run_in_turns([leg("a", 2.0, 20), leg("b", 1.0, 30)], rounds=3, clock=clock)
    assert "".join(order) == "ababbaab"
    assert found == [Trial((10.0,) * 3, 2.0), Trial((30.0,) * 3, 3.0)]


def test_the_table_says_the_spread_and_what_follows():
    names, trials = ["a", "b"], [Trial((30.0, 9.0), 2.0), Trial((30.0, 12.0), 2.5)]
    lines = describe(names, trials, PLAIN)
    assert lines[0] == "by trial, in 2 rounds; 15.0 tokens/s plainly"
    assert lines[1] == "  a: tau 2.00, 19.5 tokens/s, 1.20 x plain decoding (0.90 to 1.50)"
    assert lines[-1] == "tree auto: b; 1.35 x plain decoding (1.20 to 1.50) is expected"
    assert describe(names[:1], trials[:1], PLAIN)[-1].startswith("no tree pays, or not in every")


def test_a_trial_survives_json():
    assert Trial.from_dict(PLAIN.to_dict()) == PLAIN
