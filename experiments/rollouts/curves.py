"""Draw the curves of rollouts: reward and tau against updates, and against seconds.

    python -m experiments.rollouts.curves --runs=none=runs/none,lookup=runs/lookup --output=out.png

A name may have several folders (seeds): their mean is a line, their range a band.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.errors import UserError
from clover_jax.evaluation.plots import RC, looks
from clover_jax.field_types import setting
from clover_jax.runtime.jsonl import read_rows

SMOOTH = 5  # updates of which a point is the mean


@dataclasses.dataclass(frozen=True)
class CurveOptions:
    """The flags of this command."""

    runs: str | None = setting(None, "NAME=FOLDER of each run, by commas; seeds share a name")
    output: str = setting("curves.png", "file of the picture")


def draw(runs: Mapping[str, Sequence[Path]], title: str, path: Path) -> None:
    """Draw the runs of each name, all of as many updates, from their updates.jsonl."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        grid = figure.subplots(2, 2, sharex="col", sharey="row")
        for name, look in looks(runs).items():
            rows = [list(read_rows(folder / "updates.jsonl")) for folder in runs[name]]
            seconds = np.cumsum(column(rows, "rollout_seconds", "update_seconds"), axis=1)
            for of_figure, figure_name in zip(grid, ("reward", "tau"), strict=True):
                values = smooth(column(rows, figure_name))
                shape = {"color": look.color, "linestyle": look.line}
                for axes, along in zip(of_figure, (column(rows, "update"), seconds), strict=True):
                    x = smooth(along).mean(axis=0)
                    axes.plot(x, values.mean(axis=0), label=name, **shape)
                    low, high = values.min(axis=0), values.max(axis=0)
                    axes.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)
                of_figure[0].set_ylabel(figure_name)
        for axes, label in zip(grid[-1], ("updates", "seconds, without compilation"), strict=True):
            axes.set_xlabel(label)
        grid[0, 0].legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(path, dpi=120)


def column(runs: Sequence[Sequence[Mapping]], *names: str) -> np.ndarray:
    """Return the sum of the named figures of every update, [runs, updates]."""
    return np.array([[sum(row[name] or 0 for name in names) for row in rows] for rows in runs])


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the means of the last SMOOTH updates, or of all where there are fewer."""
    size = min(SMOOTH, values.shape[1])
    windows = np.lib.stride_tricks.sliding_window_view(values, size, axis=1)
    return windows.mean(axis=-1)


def define_flags(flags) -> None:
    """Define this command's flags."""
    define_settings(flags, CurveOptions)


def main(flags) -> int:
    """Draw what the flags name."""
    options = settings_from(flags, CurveOptions)
    runs: dict[str, list[Path]] = {}
    for named in (options.runs or "").split(","):
        name, equals, folder = named.partition("=")
        if not equals or not (Path(folder) / "updates.jsonl").is_file():
            raise UserError(f"--runs={options.runs}: {named!r} is not NAME=FOLDER of a run")
        runs.setdefault(name, []).append(Path(folder))
    draw(runs, f"mean and range of runs, means of {SMOOTH} updates", Path(options.output))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
