"""The plots of a report: readable in print and by colour-blind readers, labelled in place.

Colours are Okabe and Ito's; every method also has a marker and a hatch of its own, so that a grey
copy tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.evaluation.options import VANILLA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_LINES = ("-", "--", "-.", ":")
_WIDTH, _HEIGHT = 6.4, 3.8
_RC = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "clover_jax",  # the same figures give the same file
}


class Look(NamedTuple):
    """How one method appears in every plot."""

    colour: str
    marker: str
    hatch: str
    line: str


def look(number: int) -> Look:
    """Return the look of draft `number`."""
    choices = (_COLOURS, _MARKERS, _HATCHES, _LINES)
    return Look(*(choice[number % len(choice)] for choice in choices))


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


def save(name: str, draw: Callable[[], Figure], folder: Path) -> Path:
    """Draw one plot and write it as NAME.png and NAME.svg; return the former."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_RC):
        figure = draw()
        for suffix, options in ((".png", {"dpi": 160}), (".svg", {"metadata": {"Date": None}})):
            figure.savefig(folder / f"{name}{suffix}", bbox_inches="tight", **options)
    return folder / f"{name}.png"


def new_figure(
    columns: int = 1, rows: int = 1, width: float = _WIDTH
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its axes, row by row; no window is ever opened."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, _HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def grouped_bars(
    axes: Axes,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draw a bar for each name in each group, each name with its look; errors are (down, up)."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        style = look(number)
        places = [i + (number - (len(heights) - 1) / 2) * width for i in range(len(groups))]
        error = None
        if errors is not None:
            error = list(zip(*errors[name], strict=True))
        axes.bar(
            places,
            values,
            width * 0.92,
            label=name,
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.5,
            yerr=error,
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
    axes.set_xticks(range(len(groups)), [_folded(group) for group in groups])
    axes.grid(axis="y", alpha=0.3)


def label_lines(axes: Axes, drafts: Sequence[str], ends: Mapping[str, tuple[float, float]]) -> None:
    """Write the name of each draft that has a line at its right end, apart from the others."""
    low, high = axes.get_ylim()
    heights = spread_out([y for _, y in ends.values()], (high - low) * 0.07, high)
    for name, height in zip(ends, heights, strict=True):
        axes.annotate(
            name,
            (ends[name][0], height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=look(drafts.index(name)).colour,
            annotation_clip=False,
        )


def spread_out(heights: Sequence[float], gap: float, ceiling: float) -> list[float]:
    """Return heights in the same order at least `gap` apart, moved up where there is room.

    Example: heights [5, 5, 1], a gap of 2 and a ceiling of 6 give [4, 6, 1].
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    top = ceiling
    for i in reversed(order):
        placed[i] = min(placed[i], top)
        top = placed[i] - gap
    return placed


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
            _line(axes, points, number)
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
    _legend(axes)
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
        _line(axes, points, number)
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
    figure, (axes,) = new_figure(width=max(_WIDTH, 1.25 * len(groups)))
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
    _vanilla_line(axes)
    axes.set_ylabel(f"speed-up over plain decoding, x\n(batch size {report['batch_sizes'][0]})")
    _legend(axes)
    return figure


def _speedup_by_batch_size(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    figure, (axes,) = new_figure()
    sizes, ends = sorted(report["batch_sizes"]), {}
    for number, name in enumerate(drafts):
        found = [report["speed"][str(size)][name]["overall"]["speedup"] for size in sizes]
        points = [(i, one["median"]) for i, one in enumerate(found) if one]
        _line(axes, points, number)
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
        _line(axes, points, number)
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


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int) -> None:
    style = look(number)
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=style.colour,
        marker=style.marker,
        linestyle=style.line,
    )


def _vanilla_line(axes: Axes) -> None:
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.annotate(
        "plain decoding",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, handlelength=1.6)


def _with_tau(report: Mapping[str, Any], name: str) -> str:
    tau = report["methods"][name]["overall"]["tau"]
    return name if tau is None else f"{name} (tau {tau:.2f})"


def _depth(report: Mapping[str, Any], drafts: Sequence[str]) -> int:
    return max(len(report["methods"][name]["overall"]["hit_rate"]) for name in drafts)


def _folded(text: str) -> str:
    """Put the words of a task's name on lines of their own."""
    return text.replace("_", "\n").replace("-", "\n")
