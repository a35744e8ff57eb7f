"""How every plot looks: readable in print and by colour-blind readers, no text inside the axes.

Colours are Okabe and Ito's; every method also has a marker and a hatch of its own, so that a grey
copy tells them apart.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_LINES = ("-", "--", "-.", ":")
WIDTH, _HEIGHT = 6.4, 3.8
_INCHES_PER_CHARACTER = 0.085  # at the size of the font below, rounded up
_RC: dict[Any, Any] = {  # matplotlib's annotation lists every key
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
    """Return the look of draft `number`; the first 36 differ."""
    # The seventh has the first one's colour again, so its marker and hatch are shifted by one.
    shifted = number + number // len(_COLOURS)
    return Look(
        _COLOURS[number % len(_COLOURS)],
        *(choice[shifted % len(choice)] for choice in (_MARKERS, _HATCHES, _LINES)),
    )


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw in the style of the reports while the context lasts."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def save(name: str, draw: Callable[[], Figure], folder: Path) -> Path:
    """Draw one plot and write it as NAME.png and NAME.svg; return the former."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        figure = draw()
        for suffix, options in ((".png", {"dpi": 160}), (".svg", {"metadata": {"Date": None}})):
            figure.savefig(folder / f"{name}{suffix}", bbox_inches="tight", **options)
    return folder / f"{name}.png"


def new_figure(
    columns: int = 1, rows: int = 1, width: float = WIDTH
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its axes, row by row; no window is ever opened."""
    from matplotlib.figure import Figure

    # Not pyplot: it keeps every figure, and may look for a display.
    figure = Figure(figsize=(width, _HEIGHT * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def draw_bars(
    axes: Axes,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draw a bar for each name in each group, each name with its look; errors are (down, up)."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        shown = look(number)
        # The bars of a group stand side by side, their middle at the group's place.
        offset = (number - (len(heights) - 1) / 2) * width
        axes.bar(
            [place + offset for place in range(len(groups))],
            values,
            width * 0.92,
            label=name,
            color=shown.colour,
            hatch=shown.hatch,
            edgecolor="white",
            linewidth=0.5,
            yerr=None if errors is None else list(zip(*errors[name], strict=True)),
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
    axes.set_xticks(range(len(groups)), [_folded(group) for group in groups])
    axes.grid(axis="y", alpha=0.3)


def draw_spreads(
    axes: Axes, groups: Sequence[str], spreads: Mapping[str, Sequence[Mapping[str, Any] | None]]
) -> None:
    """Draw a bar for each median, with its range from least to most; none for None."""
    # A bar without height, so that the others of its group stay in their places.
    none = {"median": 0.0, "least": 0.0, "most": 0.0}
    filled = {name: [one or none for one in values] for name, values in spreads.items()}
    draw_bars(
        axes,
        groups,
        {name: [one["median"] for one in values] for name, values in filled.items()},
        {
            name: [(one["median"] - one["least"], one["most"] - one["median"]) for one in values]
            for name, values in filled.items()
        },
    )


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw each name's line through its points (x, y), with its look."""
    for number, (name, points) in enumerate(lines.items()):
        shown = look(number)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=shown.colour,
            marker=shown.marker,
            linestyle=shown.line,
            clip_on=False,  # or the axes would cut a marker that lies on them
        )
    axes.grid(alpha=0.3)


def mark_plain_decoding(axes: Axes) -> None:
    """Mark a speed-up of 1, labelled beside the axes."""
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.annotate(
        "plain\ndecoding",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of what the axes show above the whole figure, as many in a row as fit."""
    # "outside" makes room in height only, so names are folded and columns counted to fit the width.
    handles, names = axes.get_legend_handles_labels()
    width = figure.get_figwidth()
    names = [textwrap.fill(name, int(width / _INCHES_PER_CHARACTER) - 8) for name in names]
    longest = max(len(line) for name in names for line in name.splitlines())
    fitting = int(width / (_INCHES_PER_CHARACTER * (longest + 8)))  # 8: the sample of the line
    columns = min(max(fitting, 1), 4)
    # Every row after the first takes its height from nowhere else.
    lines = sum(name.count("\n") + 1 for name in names) / columns
    figure.set_figheight(figure.get_figheight() + 0.2 * (lines - 1))
    figure.legend(
        handles,
        names,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=2.4,
    )


def _folded(text: str) -> str:
    """Put each word of a task's name on its own line, and break the longest ones."""
    lines = (textwrap.wrap(word, 14) for word in re.split("[-_ ]", text))
    return "\n".join(itertools.chain.from_iterable(lines))
