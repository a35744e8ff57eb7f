"""The plots of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_jax.evaluation.drawing import (
    WIDTH,
    draw_line,
    grouped_bars,
    label_lines,
    legend,
    look,
    new_figure,
    save,
    vanilla_line,
)
from clover_jax.evaluation.options import VANILLA

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the report has figures for, as PNG and SVG; return the PNG files."""
    drafts = [name for name in report["methods"] if name != VANILLA]
    if not drafts:
        return []
    plots: dict[str, Callable[[], Figure]] = {
        "hit_rate": lambda: _hit_rate(report, drafts),
        "accepted_lengths": lambda: _accepted_lengths(report, drafts),
        "accepted_by_context": lambda: _by_context(report, drafts),
        "speedup_by_task": lambda: _speedup_by_task(report, drafts),
    }
    if len(report["batch_sizes"]) > 1:
        plots["speedup_by_batch_size"] = lambda: _speedup_by_batch_size(report, drafts)
    if any(report["training"].values()):
        plots["tau_by_step"] = lambda: _tau_in_training(report, drafts, "step")
    if any("tokens" in row for rows in report["training"].values() for row in rows):
        plots["tau_by_tokens"] = lambda: _tau_in_training(report, drafts, "tokens")
    return [save(name, draw, folder) for name, draw in plots.items()]


def _hit_rate(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    figure, panels = new_figure(2, width=8.4)
    kinds = (
        ("hit_rate", "joint: positions 0..i all accepted"),
        ("conditional_hit_rate", "conditional: given 0..i-1 accepted"),
    )
    for axes, (key, title) in zip(panels, kinds, strict=True):
        ends = {}
        for number, name in enumerate(drafts):
            rates = report["methods"][name]["overall"][key]
            points = [(i, rate) for i, rate in enumerate(rates) if rate is not None]
            draw_line(axes, points, number)
            ends |= {name: points[-1]} if points else {}
        axes.set_title(title, pad=10)
        axes.set(xlabel="draft position i", ylim=(0, 1.02))
        axes.set_xticks(range(_depth(report, drafts)))
        axes.grid(alpha=0.3)
        label_lines(axes, drafts, ends)
    panels[0].set_ylabel("share of forwards")
    return figure


def _accepted_lengths(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    figure, (axes,) = new_figure()
    groups = [str(k) for k in range(_depth(report, drafts) + 1)]
    heights = {}
    for name in drafts:
        cell = report["methods"][name]["overall"]
        shares = [100 * n / max(cell["target_forwards"], 1) for n in cell["accepted_histogram"]]
        heights[_with_tau(report, name)] = shares + [0.0] * (len(groups) - len(shares))
    grouped_bars(axes, groups, heights)
    axes.set(xlabel="drafted tokens accepted by a forward", ylabel="share of forwards, %")
    legend(axes)
    return figure


def _by_context(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    figure, (axes,) = new_figure()
    starts, ends = {}, {}
    for name in drafts:
        bins = report["methods"][name]["overall"]["by_context"]
        starts |= {one["from"]: f"{one['from']}-{one['to'] - 1}" for one in bins}
    order = sorted(starts)
    for number, name in enumerate(drafts):
        bins = report["methods"][name]["overall"]["by_context"]
        points = [(order.index(one["from"]), one["mean_accepted"]) for one in bins]
        draw_line(axes, points, number)
        ends |= {name: points[-1]} if points else {}
    axes.set_xticks(range(len(order)), [starts[start] for start in order])
    axes.set(
        xlabel="tokens of context before the forward",
        ylabel="drafted tokens accepted, mean",
    )
    axes.margins(y=0.15)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    label_lines(axes, drafts, ends)
    return figure


def _speedup_by_task(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    speeds = report["speed"][str(report["batch_sizes"][0])]
    tasks = list(report["tasks"])
    groups = ["overall", *tasks] if len(tasks) > 1 else tasks
    figure, (axes,) = new_figure(width=max(WIDTH, 1.25 * len(groups)))
    heights, errors = {}, {}
    for name in drafts:
        found = [speeds[name]["overall"], *(speeds[name]["tasks"][task] for task in tasks)]
        found = [one["speedup"] for one in found[len(found) - len(groups) :]]
        label = _with_tau(report, name)
        heights[label] = [one["median"] if one else 0.0 for one in found]
        errors[label] = [
            (one["median"] - one["least"], one["most"] - one["median"]) if one else (0.0, 0.0)
            for one in found
        ]
    grouped_bars(axes, groups, heights, errors)
    vanilla_line(axes)
    axes.set_ylabel(f"speed-up over plain decoding, x\n(batch size {report['batch_sizes'][0]})")
    legend(axes)
    return figure


def _speedup_by_batch_size(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    figure, (axes,) = new_figure()
    sizes, ends = sorted(report["batch_sizes"]), {}
    for number, name in enumerate(drafts):
        found = [report["speed"][str(size)][name]["overall"]["speedup"] for size in sizes]
        points = [(i, one["median"]) for i, one in enumerate(found) if one]
        draw_line(axes, points, number)
        for i, one in enumerate(found):
            if one:
                axes.vlines(i, one["least"], one["most"], color=look(number).colour, linewidth=1)
        ends |= {name: points[-1]} if points else {}
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(xlabel="rows decoded at once", ylabel="speed-up over plain decoding, x")
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.annotate("plain decoding", (0, 1), xytext=(0, 3), textcoords="offset points", fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    label_lines(axes, drafts, ends)
    return figure


def _tau_in_training(report: Mapping[str, Any], drafts: Sequence[str], by: str) -> Figure:
    """Draw tau against what `by` counts, "step" or "tokens"; runs that lack it have no line."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, (axes,) = new_figure()
    ends = {}
    for number, name in enumerate(drafts):
        rows = report["training"].get(name, [])
        points = [(row[by], row["tau"]) for row in rows if by in row]
        draw_line(axes, points, number)
        ends |= {name: points[-1]} if points else {}
    labels = {"step": "training step", "tokens": "training tokens"}
    axes.set(xlabel=labels[by], ylabel="tau measured in training")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(y=0.15)
    axes.set_ylim(1, None)
    axes.set_xlim(0, None)
    axes.grid(alpha=0.3)
    label_lines(axes, drafts, ends)
    return figure


def _with_tau(report: Mapping[str, Any], name: str) -> str:
    tau = report["methods"][name]["overall"]["tau"]
    return name if tau is None else f"{name} (tau {tau:.2f})"


def _depth(report: Mapping[str, Any], drafts: Sequence[str]) -> int:
    return max(len(report["methods"][name]["overall"]["hit_rate"]) for name in drafts)
