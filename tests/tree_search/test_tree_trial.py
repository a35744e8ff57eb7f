"""What a trial decides, with given numbers and a given clock."""

import pytest

from clover_jax.tree_search.auto_tree import rows_a_round
from clover_jax.tree_search.tree_trial import (
    Decoded,
    SpeedUp,
    Trial,
    describe,
    fastest,
    run_in_turns,
    share_out,
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


def test_passes_take_turns_after_one_to_compile_and_who_begins_rotates():
    clock, order = Clock(), []

    def decode(name, seconds, tokens):
        def run(turn):
            order.append(f"{name}{turn}")
            clock.now += seconds if len(order) > 2 else 100.0
            return Decoded(tokens + turn, forwards=10)

        return run

    found = run_in_turns([decode("a", 2.0, 20), decode("b", 1.0, 30)], rounds=3, clock=clock)
    assert " ".join(order) == "a0 b0 a0 b0 b1 a1 a2 b2"
    assert found == [Trial((10.0, 10.5, 11.0), 2.1), Trial((30.0, 31.0, 32.0), 3.1)]


def test_rounds_share_the_prompts_out():
    assert share_out(list("abcde"), 2, rounds=3) == [["a", "b"], ["c", "d"], ["e", "a"]]
    assert share_out(["a"], 2, rounds=2) == [["a", "a"]] * 2


@pytest.mark.parametrize(
    ("prompts", "batch", "seconds", "rows"),
    [(16, 1, 0.005, 4), (16, 1, 0.1, 2), (16, 8, 0.005, 8), (1, 1, 0.005, 1), (8, 1, 10.0, 2)],
)
def test_no_trial_judges_by_one_prompt_where_there_are_more(prompts, batch, seconds, rows):
    assert rows_a_round(prompts, batch, seconds) == rows
    rounds = share_out(range(prompts), rows)
    assert len({prompt for round_ in rounds for prompt in round_}) >= min(prompts, 8)


def test_the_table_says_the_prompts_the_spread_and_what_follows():
    names, trials = ["a", "b"], [Trial((30.0, 9.0), 2.0), Trial((30.0, 12.0), 2.5)]
    lines = describe(names, trials, PLAIN, 10)
    assert lines[0] == "by trial, in 2 rounds over 10 different prompts; 15.0 tokens/s plainly"
    assert lines[1] == "  a: tau 2.00, 19.5 tokens/s, 1.20 x plain decoding (0.90 to 1.50)"
    assert lines[-1] == "tree auto: b; 1.35 x plain decoding (1.20 to 1.50) is expected"
    few = describe(names[:1], trials[:1], PLAIN, 1)
    assert few[1] == "  1 prompt may not stand for others; give 5 or more with --calibration=FILE"
    assert few[-1].startswith("no tree pays, or not in every")


def test_a_trial_survives_json():
    assert Trial.from_dict(PLAIN.to_dict()) == PLAIN
