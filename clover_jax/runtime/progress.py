"""Progress on stderr: a bar on a terminal, an occasional plain line everywhere else."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from clover_jax.errors import UserError

if TYPE_CHECKING:  # it loads JAX, which commands need not have done yet
    from clover_jax.runtime.compile_clock import CompileClock

_SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass
class Progress:
    """A display of progress, as `progress_bar` makes it; a context manager that closes itself."""

    total: int
    desc: str
    unit: str
    initial: int
    file: TextIO
    compiling: "CompileClock | None"

    def __post_init__(self):
        # Compilation before the bar began does not count.
        self._compiled = self.compiling.seconds if self.compiling else 0.0

    def update(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""

    def show(self, figures: str) -> None:
        """Put `figures`, such as "loss 1.93, hit 0.61", at the end of the bar."""

    def write(self, line: str) -> None:
        """Print a line of its own without breaking the bar."""

    def close(self) -> None:
        """Finish the bar; what comes after it starts on a new line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _newly_compiled(self) -> float:
        """Return the seconds of compilation since the last call."""
        if self.compiling is None:
            return 0.0
        before, self._compiled = self._compiled, self.compiling.seconds
        return self._compiled - before


def progress_bar(
    total: int,
    desc: str,
    unit: str = "step",
    *,
    initial: int = 0,
    file: TextIO | None = None,
    compiling: "CompileClock | None" = None,
) -> Progress:
    """Return a progress display with rate, time left and the figures given to `show`.

    desc: the work, in a word or two. unit: what is counted, in the singular.
    initial: units that an earlier run has done; they count for the position, not for the rate.
    file: where it goes, stderr by default. Not a terminal: a plain line every ten seconds.
    compiling: a clock whose seconds count neither for the rate nor for the time left.
    """
    file = sys.stderr if file is None else file
    display = _Bar if file.isatty() else _Lines
    return display(total, desc, unit, initial, file, compiling)


class _Bar(Progress):
    def __post_init__(self):
        super().__post_init__()
        from tqdm import tqdm  # only terminals pay for the import

        # No monitor thread: it would outlive the bar and warn at fork.
        tqdm.monitor_interval = 0
        self._bar = tqdm(
            total=self.total,
            desc=self.desc,
            unit=f" {self.unit}",
            initial=self.initial,
            file=self.file,
            dynamic_ncols=True,
            mininterval=0.2,
        )

    def update(self, amount: int = 1) -> None:
        # tqdm takes its rates from these two times; later ones leave the compilation out.
        compiled = self._newly_compiled()
        self._bar.start_t += compiled
        self._bar.last_print_t += compiled
        self._bar.update(amount)

    def show(self, figures: str) -> None:
        self._bar.set_postfix_str(figures, refresh=False)

    def write(self, line: str) -> None:
        self._bar.write(line, file=self._bar.fp)

    def close(self) -> None:
        self._bar.close()


class _Lines(Progress):
    def __post_init__(self):
        super().__post_init__()
        self._done, self._figures = self.initial, ""
        self._started = self._last_line = time.monotonic()
        self._printed: int | None = None

    def update(self, amount: int = 1) -> None:
        self._done += amount
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._print()

    def show(self, figures: str) -> None:
        self._figures = figures

    def write(self, line: str) -> None:
        print(line, file=self.file, flush=True)

    def close(self) -> None:
        # Prints the last state, unless it has been printed already.
        if self._printed != self._done:
            self._print()

    def __exit__(self, *exception: object) -> None:
        if not isinstance(exception[1], UserError | OSError):  # reported in a single line
            self.close()

    def _print(self) -> None:
        self._last_line, self._printed = time.monotonic(), self._done
        # Moving the start leaves compilation out of rate and time left.
        self._started += self._newly_compiled()
        elapsed = self._last_line - self._started
        self.write(
            format_progress(self.desc, self.unit, self._done, self.total, self.initial, elapsed)
            + (f", {self._figures}" if self._figures else "")
        )


def say(line: str | None) -> None:
    """Print a line on stderr; None prints nothing."""
    if line is not None:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_note(text: str, file: TextIO | None = None) -> Iterator[None]:
    """Show `text` during long work; on a terminal only, and cleared afterwards."""
    file = sys.stderr if file is None else file
    if not file.isatty():
        yield
        return
    # No newline: the note is overwritten in the end, or by what comes next.
    print(f"\r{text} ...", end="", file=file, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=file, flush=True)  # back to the start, erase the line


def format_progress(
    desc: str, unit: str, done: int, total: int, initial: int, elapsed: float
) -> str:
    """Return the plain line for `done` of `total` units after `elapsed` seconds.

    Example: `format_progress("train", "step", 120, 400, 20, 50.0)` is
    "train: 120/400 steps (30%), 2.00 steps/s, 2:20 left".
    """
    units = unit + "s"
    line = f"{desc}: {done}/{total} {units}"
    # Nothing of 0 units is a percentage.
    if total:
        line += f" ({100 * done // total}%)"
    # An earlier run's units took time that is not in `elapsed`.
    if done > initial and elapsed > 0:
        rate = (done - initial) / elapsed
        line += f", {rate:.{3 if rate < 0.1 else 2}f} {units}/s"
        if done < total:
            line += f", {format_duration((total - done) / rate)} left"
    return line


def format_duration(seconds: float) -> str:
    """Return a duration as m:ss, or h:mm:ss from an hour on; 140.2 gives "2:20"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
