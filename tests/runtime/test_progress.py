"""Progress: a bar for terminals, plain lines elsewhere."""

import io

import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import progress
from clover_jax.runtime.progress import passing_note, progress_bar


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
    assert "train: 100%" in shown
    assert "2/2 " in shown
    assert "loss 1.5" in shown
    assert "a line of its own\n" in shown
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
