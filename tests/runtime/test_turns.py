"""Timing in turns, by a clock that the functions themselves move on."""

import pytest

from clover_jax.runtime.turns import WARM_UP, time_in_turns


class Clock:
    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def run(self, name, seconds):
        def call():
            self.order.append(name)
            self.now += next(seconds) if hasattr(seconds, "__next__") else seconds

        return call


def test_the_median_of_the_rounds_is_taken_after_the_warm_up():
    clock = Clock()
    slow_start = iter([9.0, 9.0, 9.0, 1.0, 5.0, 2.0])
    runs = {"a": clock.run("a", slow_start), "b": clock.run("b", 0.5)}
    assert time_in_turns(runs, 3, clock=clock) == {"a": 2.0, "b": 0.5}
    assert clock.order[2 * WARM_UP :] == ["a", "b"] * 3


def test_short_functions_are_called_several_times_a_turn_and_single_ones_once():
    clock = Clock()
    runs = {"short": clock.run("short", 0.001), "single": clock.run("single", 0.001)}
    timed = time_in_turns(runs, 2, single=["single"], clock=clock)
    assert timed == {"short": pytest.approx(0.001), "single": pytest.approx(0.001)}
    assert clock.order[2 * WARM_UP :] == (["short"] * 5 + ["single"]) * 2
