"""Time: what compiling took, functions timed alternately, and how far a run is."""

import io

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import compile_clock, progress
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import passing_note, progress_bar
from clover_jax.runtime.turns import WARM_UP, time_in_turns

EVENT = "/jax/core/compile/backend_compile_duration"


def test_a_second_call_compiles_nothing():
    program, x = jax.jit(lambda x: jnp.sin(x) @ x), jnp.ones((3, 3))
    with CompileClock() as clock:
        program(x)
    first = clock.seconds
    assert first > 0
    program(x + 1)  # outside: does not count
    with CompileClock() as clock:
        program(x)
    assert clock.seconds == 0


def test_what_overlaps_counts_once(monkeypatch):
    now = iter([3.0, 5.0, 9.0])
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: next(now))
    with CompileClock() as clock:
        jax.monitoring.record_event_duration_secs(EVENT, 1.0)  # 2 to 3
        jax.monitoring.record_event_duration_secs(EVENT, 4.0)  # 1 to 5
        jax.monitoring.record_event_duration_secs(EVENT, 2.0)  # 7 to 9
        jax.monitoring.record_event_duration_secs("/jax/other", 2.0)
    assert clock.seconds == pytest.approx(6)


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock in a list, so that no test depends on how fast the machine is."""
    now = [0.0]
    for name in ("clover_jax.runtime.progress.time.monotonic", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: now[0])
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    return now


def test_elsewhere_a_line_is_printed_every_ten_seconds_and_at_the_end(clock):
    file = io.StringIO()
    with progress_bar(4, "train", file=file) as bar:
        for step in range(4):
            clock[0] += 6
            bar.show(f"loss {step}")
            bar.update()
    assert file.getvalue().splitlines() == [
        "train: 2/4 steps (50%), 0.17 steps/s, 00:12 left, loss 1",
        "train: 4/4 steps (100%), 0.17 steps/s, loss 3",
    ]


def test_what_an_earlier_run_did_counts_for_the_position_not_for_the_rate(clock):
    file = io.StringIO()
    with progress_bar(10, "train", initial=8, file=file) as bar:
        clock[0] += 1
        bar.update()
        bar.write("saved")
    assert file.getvalue() == "saved\ntrain: 9/10 steps (90%), 1.00 steps/s, 00:01 left\n"


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()])
def test_a_first_unit_that_compiles_counts_neither_for_the_rate_nor_for_the_time_left(clock, file):
    with progress_bar(6, "train", file=file, first_compiles=True) as bar:
        bar.update(0)
        for seconds in (90, 2, 2):
            clock[0] += seconds
            bar.update()
    shown = file.getvalue()
    if file.isatty():
        assert "00:04<00:06,  2.00s/ step" in shown
    else:
        first, *_, last = shown.splitlines()
        assert first == "train: 1/6 steps (16%)"
        assert last == "train: 3/6 steps (50%), 0.50 steps/s, 00:06 left"


def test_on_a_terminal_there_is_a_bar():
    file = Terminal()
    with progress_bar(2, "train", "row", file=file) as bar:
        bar.show("loss 1.5")
        bar.update(2)
        bar.write("a line of its own")
    shown = file.getvalue()
    for words in ("train: 100%", "2/2 ", "loss 1.5", "a line of its own\n"):
        assert words in shown
    assert shown.endswith("\n")


def test_a_mistake_gets_no_line_of_progress_and_nothing_done_no_rate():
    file = io.StringIO()
    with pytest.raises(UserError), progress_bar(9, "read", "row", file=file):
        raise UserError("a mistake")
    assert file.getvalue() == ""
    with progress_bar(9, "read", "row", file=file), progress_bar(0, "load", "row", file=file):
        pass
    assert file.getvalue() == "load: 0/0 rows\nread: 0/9 rows (0%)\n"


def test_a_passing_note_is_for_terminals_and_goes_away_even_after_an_error():
    terminal, pipe = Terminal(), io.StringIO()
    with pytest.raises(KeyError, match="cause"), passing_note("compiling", terminal):
        assert terminal.getvalue() == "\rcompiling ..."
        raise KeyError("cause")
    assert terminal.getvalue() == "\rcompiling ...\r\033[K"
    with passing_note("compiling", pipe):
        assert pipe.getvalue() == ""
