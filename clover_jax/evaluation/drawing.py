"""How every plot looks: readable in print and by colour-blind readers, labelled in place.

Colours are Okabe and Ito's; every method also has a marker and a hatch of its own, so that a grey
copy tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_LINES = ("-", "--", "-.", ":")
WIDTH, _HEIGHT = 6.4, 3.8
_RC = {
    "font.size": 10,
    "text.parse_math": False,  # a task's name may have a "$"
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
    columns: int = 1, rows: int = 1, width: float = WIDTH
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


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], number: int) -> None:
    """Draw one method's line through points (x, y), with its look."""
    style = look(number)
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=style.colour,
        marker=style.marker,
        linestyle=style.line,
    )


def vanilla_line(axes: Axes) -> None:
    """Mark a speed-up of 1, and say what it is."""
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


def legend(axes: Axes) -> None:
    """Put the legend above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, handlelength=1.6)


def _folded(text: str) -> str:
    """Put the words of a task's name on lines of their own."""
    return text.replace("_", "\n").replace("-", "\n")
