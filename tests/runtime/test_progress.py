"""Progress: a bar for terminals, plain lines elsewhere."""

import io

import pytest

from clover_jax.runtime import progress
from clover_jax.runtime.progress import format_duration, format_progress, passing_note, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock in a list, so that no test depends on how fast the machine is."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_a_line_is_printed_every_ten_seconds_and_at_the_end(clock):
    file = io.StringIO()
    with progress_bar(4, "train", file=file) as bar:
        for step in range(4):
            clock[0] += 6
            bar.show(f"loss {step}")
            bar.update()
    assert file.getvalue().splitlines() == [
        "train: 2/4 steps (50%), 0.17 steps/s, 0:12 left, loss 1",
        "train: 4/4 steps (100%), 0.17 steps/s, loss 3",
    ]


def test_what_an_earlier_run_did_counts_for_the_position_not_for_the_rate(clock):
    file = io.StringIO()
    with progress_bar(10, "train", initial=8, file=file) as bar:
        clock[0] += 1
        bar.update()
        bar.write("saved")
    assert file.getvalue() == "saved\ntrain: 9/10 steps (90%), 1.00 steps/s, 0:01 left\n"


class Compiled:
    """A clock of compilation that is set by hand."""

    seconds = 0.0


def test_compilation_counts_neither_for_the_rate_nor_for_the_time_left(clock):
    file, compiling = io.StringIO(), Compiled()
    compiling.seconds = 100.0  # before the bar began
    with progress_bar(4, "evaluate", "row", file=file, compiling=compiling) as bar:
        compiling.seconds += 30
        clock[0] += 32
        bar.update()
        clock[0] += 2
        bar.update()
    assert file.getvalue().splitlines() == [
        "evaluate: 1/4 rows (25%), 0.50 rows/s, 0:06 left",
        "evaluate: 2/4 rows (50%), 0.50 rows/s, 0:04 left",
    ]


def test_compilation_is_left_out_of_the_bar_too(monkeypatch):
    now, compiling, file = [0.0], Compiled(), Terminal()
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar(4, "evaluate", "row", file=file, compiling=compiling) as bar:
        compiling.seconds += 30
        now[0] += 32
        bar.update()
    shown = file.getvalue()
    assert "00:02<00:06" in shown
    assert "2.00s/ row" in shown


def test_on_a_terminal_there_is_a_bar():
    file = Terminal()
    with progress_bar(2, "train", "row", file=file) as bar:
        bar.show("loss 1.5")
        bar.update(2)
        bar.write("a line of its own")
    shown = file.getvalue()
    assert "train: 100%" in shown
    assert "2/2 " in shown
    assert "loss 1.5" in shown
    assert "a line of its own\n" in shown
    assert shown.endswith("\n")


def test_the_example_of_the_plain_line():
    line = format_progress("train", "step", 120, 400, 20, 50.0)
    assert line == "train: 120/400 steps (30%), 2.00 steps/s, 2:20 left"


def test_a_line_without_a_rate():
    assert format_progress("read", "row", 0, 9, 0, 0.0) == "read: 0/9 rows (0%)"


def test_durations():
    assert [format_duration(seconds) for seconds in (0.2, 140.2, 3599.6, 7325)] == [
        "0:00",
        "2:20",
        "1:00:00",
        "2:02:05",
    ]


def test_a_passing_note_is_for_terminals_and_goes_away_even_after_an_error():
    terminal, pipe = Terminal(), io.StringIO()
    with pytest.raises(KeyError, match="cause"), passing_note("compiling", terminal):
        assert terminal.getvalue() == "\rcompiling ..."
        raise KeyError("cause")
    assert terminal.getvalue() == "\rcompiling ...\r\033[K"
    with passing_note("compiling", pipe):
        assert pipe.getvalue() == ""
