"""The plots of a report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_jax.evaluation.drawing import (
    WIDTH,
    draw_bars,
    draw_lines,
    draw_spreads,
    legend,
    look,
    mark_plain_decoding,
    new_figure,
    save,
)
from clover_jax.evaluation.markdown import groups, speed_of
from clover_jax.evaluation.options import VANILLA

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the report has figures for, as PNG and SVG; return the PNG files."""
    return [save(name, draw, folder) for name, draw in plots_of(report).items()]


def plots_of(report: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
    """Return name -> function that draws a plot; plots with lines of one point are left out."""
    # Only drafts are drawn; in plots of speed-ups plain decoding is the line at 1.
    overall = {
        name: cells["overall"] for name, cells in report["methods"].items() if name != VANILLA
    }
    if not overall:
        return {}

    plots: dict[str, Callable[[], Figure]] = {}
    # One position would be a point, not a line.
    if _depth(overall) > 1:
        plots["hit_rate"] = lambda: _hit_rate(overall)
    plots["accepted_lengths"] = lambda: _accepted_lengths(overall)
    if len({one["from"] for cell in overall.values() for one in cell["by_context"]}) > 1:
        plots["accepted_by_context"] = lambda: _accepted_by_context(overall)
    plots["speedup_by_task"] = lambda: _speedup_by_task(report, overall)
    if len(report["batch_sizes"]) > 1:
        plots["speedup_by_batch_size"] = lambda: _speedup_by_batch_size(report, list(overall))
    for by in ("step", "tokens", "seconds"):
        # A draft has no points where its run did not note what `by` counts.
        runs = {
            name: [(row[by], row["tau"]) for row in report["training"].get(name, []) if by in row]
            for name in overall
        }
        if any(len(points) > 1 for points in runs.values()):
            plots[f"tau_by_{by}"] = functools.partial(_tau_by, runs, by)
    return plots


def _hit_rate(overall: Mapping[str, Any]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, panels = new_figure(2, width=8.4)
    kinds = (
        ("hit_rate", "joint: positions 0..i all accepted"),
        ("conditional_hit_rate", "conditional: given 0..i-1 accepted"),
    )
    # A line has no point where no forward came that far.
    for axes, (key, title) in zip(panels, kinds, strict=True):
        draw_lines(
            axes,
            {
                name: [(i, rate) for i, rate in enumerate(cell[key]) if rate is not None]
                for name, cell in overall.items()
            },
        )
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="draft position i", ylim=(0, 1.02), xlim=(-0.3, _depth(overall) - 0.7))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("share of forwards")
    legend(figure, panels[0])
    return figure


def _accepted_lengths(overall: Mapping[str, Any]) -> Figure:
    groups = [str(k) for k in range(_depth(overall) + 1)]
    figure, (axes,) = new_figure(width=max(WIDTH, 0.12 * len(groups) * len(overall)))
    heights = {}
    for name, cell in overall.items():
        shares = [100 * n / max(cell["target_forwards"], 1) for n in cell["accepted_histogram"]]
        # Drafts of a shorter tree have no bar on the right.
        heights[_with_tau(name, cell)] = shares + [0.0] * (len(groups) - len(shares))
    draw_bars(axes, groups, heights)
    axes.set(xlabel="drafted tokens accepted by a forward", ylabel="share of forwards, %")
    legend(figure, axes)
    return figure


def _accepted_by_context(overall: Mapping[str, Any]) -> Figure:
    bins = {one["from"]: one["to"] - 1 for cell in overall.values() for one in cell["by_context"]}
    starts = sorted(bins)
    # Bins double in length, so they stand at equal distances.
    figure, (axes,) = new_figure(width=max(WIDTH, 0.7 * len(starts)))
    draw_lines(
        axes,
        {
            name: [(starts.index(one["from"]), one["mean_accepted"]) for one in cell["by_context"]]
            for name, cell in overall.items()
        },
    )
    axes.set_xticks(range(len(starts)), [f"{start}\nto {bins[start]}" for start in starts])
    axes.set(xlabel="tokens of context before the forward", ylabel="drafted tokens accepted, mean")
    axes.set_ylim(0, None)
    legend(figure, axes)
    return figure


def _speedup_by_task(report: Mapping[str, Any], overall: Mapping[str, Any]) -> Figure:
    # A single task is all of them, and keeps its name.
    tasks = groups(report["tasks"])
    labels = [task or "overall" for task in tasks] if len(tasks) > 1 else list(report["tasks"])
    spreads = {
        # The legend adds each draft's tau, which explains its speed-up.
        _with_tau(name, cell): [speed_of(report, name, task)["speedup"] for task in tasks]
        for name, cell in overall.items()
    }
    figure, (axes,) = new_figure(width=max(WIDTH, 1.25 * len(tasks)))
    draw_spreads(axes, labels, spreads)
    mark_plain_decoding(axes)
    size = report["batch_sizes"][0]
    axes.set_ylabel(f"speed-up over plain decoding, x\n(batch size {size})")
    legend(figure, axes)
    return figure


def _speedup_by_batch_size(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    # Sizes stand at equal distances, or large ones would crowd the small.
    figure, (axes,) = new_figure()
    sizes, lines = sorted(report["batch_sizes"]), {}
    for number, name in enumerate(drafts):
        spreads = [report["speed"][str(size)][name]["overall"]["speedup"] for size in sizes]
        measured = [(i, one) for i, one in enumerate(spreads) if one]
        lines[name] = [(i, one["median"]) for i, one in measured]
        # The range of the repeats, through each median.
        for i, one in measured:
            axes.vlines(i, one["least"], one["most"], color=look(number).colour, linewidth=1)

    draw_lines(axes, lines)
    mark_plain_decoding(axes)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(xlabel="rows decoded at once", ylabel="speed-up over plain decoding, x")
    axes.set_ylim(0, None)
    legend(figure, axes)
    return figure


def _tau_by(runs: Mapping[str, Sequence[tuple[float, float]]], by: str) -> Figure:
    """Draw tau against what `by` counts, "step", "tokens" or "seconds"."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, (axes,) = new_figure()
    draw_lines(axes, {name: points for name, points in runs.items() if points})
    axes.set(xlabel=f"training {by}", ylabel="tau measured in training")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    # 1M and not 1e6: tokens go into the millions.
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(1, None)
    axes.set_xlim(0, None)
    legend(figure, axes)
    return figure


def _with_tau(name: str, cell: Mapping[str, Any]) -> str:
    return name if cell["tau"] is None else f"{name} (tau {cell['tau']:.2f})"


def _depth(overall: Mapping[str, Any]) -> int:
    # The depth of the deepest tree; a draft without forwards has no rates.
    return max(len(cell["hit_rate"]) for cell in overall.values())
