"""Progress on stderr: a tqdm bar on a terminal, a plain line every ten seconds elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from clover_jax.errors import UserError

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A display of progress with rate, time left and key figures; see `progress_bar`."""

    def __init__(
        self, total: int, desc: str, unit: str, initial: int, file: TextIO, first_compiles: bool
    ):
        self._total, self._desc, self._unit, self._file = total, desc, unit, file
        self._done = self._initial = initial
        self._last_line = self._started = time.monotonic()
        self._starts_at_first = first_compiles
        self._figures, self._printed, self._bar = "", -1, None
        if file.isatty():
            tqdm.monitor_interval = 0  # a monitor thread would outlive the bar and warn at a fork
            options = {"initial": initial, "file": file, "dynamic_ncols": True, "mininterval": 0.2}
            self._bar = tqdm(total=total, desc=desc, unit=f" {unit}", **options)

    def update(self, amount: int = 1) -> None:
        self._done += amount
        bar, starts_now = self._bar, self._starts_at_first and amount > 0
        if starts_now:
            self._starts_at_first = False
            self._initial, self._started = self._done, time.monotonic()
        if bar is not None and starts_now:
            # tqdm computes its rate from these.
            bar.n = bar.initial = bar.last_print_n = self._done
            bar.start_t = bar.last_print_t = time.time()
            bar.refresh()
        elif bar is not None:
            bar.update(amount)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._print()

    def show(self, figures: str) -> None:
        """Put `figures`, such as "loss 1.93, hit 0.61", at the end of the bar."""
        self._figures = figures
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)

    def write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Finish the bar; later output starts on a new line."""
        if self._bar is not None:
            self._bar.close()
        elif self._printed != self._done:
            self._print()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        # A user's mistake is reported on a single line.
        if self._bar is not None or kind is None or not issubclass(kind, UserError | OSError):
            self.close()

    def _print(self) -> None:
        self._last_line, self._printed = time.monotonic(), self._done
        parts = [f"{self._desc}: {self._done}/{self._total} {self._unit}s"]
        if self._total:
            parts[0] += f" ({100 * self._done // self._total}%)"
        if self._done > self._initial:
            rate = (self._done - self._initial) / max(self._last_line - self._started, 1e-9)
            parts.append(f"{rate:.{3 if rate < 0.1 else 2}f} {self._unit}s/s")
            if self._done < self._total:
                left = tqdm.format_interval((self._total - self._done) / rate)
                parts.append(f"{left} left")
        self.write(", ".join(filter(None, [*parts, self._figures])))


def progress_bar(
    total: int,
    desc: str,
    unit: str = "step",
    *,
    initial: int = 0,
    file: TextIO | None = None,
    first_compiles: bool = False,
) -> Progress:
    """Return a display of progress, a context manager, with rate, time left and own figures.

    desc: the work, in a word or two. unit: in the singular. file: stderr by default.
    initial: units of an earlier run; they count for the position, not for the rate.
    first_compiles: the first unit includes compilation, so the clock starts when it is finished.
    """
    file = sys.stderr if file is None else file
    return Progress(total, desc, unit, initial, file, first_compiles)


def say(line: str | None) -> None:
    """Print a line on stderr; None prints nothing."""
    if line is not None:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_note(text: str, file: TextIO | None = None) -> Iterator[None]:
    """Show `text` during long work, on a terminal only; it is erased afterwards."""
    file = sys.stderr if file is None else file
    if not file.isatty():
        yield
        return
    # Without a newline, so that it can be overwritten.
    print(f"\r{text} ...", end="", file=file, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=file, flush=True)  # back to the start, erase the line
