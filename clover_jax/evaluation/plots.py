"""The plots of a report: tau, acceptance by position, speed, and tau by task.

Readable in print and by color-blind readers: colors are Okabe and Ito's, and every method also has
its marker and hatch. A method looks the same in every report, because its look follows its name.
"""

from __future__ import annotations

import itertools
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.page import cell_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_LINES = ("-", "--", "-.", ":")
_BASELINES = {"lookup": 1, "recycle": 3}  # in most reports, so their colors are theirs alone
# A position that fewer forwards reach has no rate worth drawing.
_LEAST_FORWARDS = 10
_WIDTH, _HEIGHT = 6.4, 3.8
_INCHES_PER_CHARACTER = 0.085  # at the font size below, rounded up
RC: dict[Any, Any] = {  # matplotlib's annotation lists every key
    "font.size": 10,
    "axes.titlesize": 10,
    "text.parse_math": False,  # a task's name may have a "$"
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}


class Look(NamedTuple):
    """How one method appears in every plot."""

    color: str
    marker: str
    hatch: str
    line: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the look of each method, which depends on its name; 24 looks and the baselines differ.

    Only where two names of a report collide, the later one moves to the next color.
    """
    found: dict[str, Look] = {}
    size, others = len(_COLORS), [i for i in range(len(_COLORS)) if i not in _BASELINES.values()]
    taken: set[int] = set()
    for name in names:
        first = others[zlib.crc32(name.encode()) % len(others)]
        # Free colors first, then the same colors with another marker and hatch.
        order = [row * size + (first + i) % size for row in range(size) for i in range(size)]
        free = (i for i in order if i % size in others and i not in taken)
        place = _BASELINES.get(name, next(free, first))
        taken.add(place)
        shifted = place + place // size
        shapes = (choice[shifted % len(choice)] for choice in (_MARKERS, _HATCHES, _LINES))
        found[name] = Look(_COLORS[place % size], *shapes)
    return found


def draw_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots that the report has figures for as PNG; return the files."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in plots_of(report).items():
        files.append(folder / f"{name}.png")
        with matplotlib.rc_context(RC):
            draw().savefig(files[-1], bbox_inches="tight", dpi=160)
    return files


def plots_of(report: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
    """Return name -> function that draws a plot; plots without data are left out."""
    drafts = [name for name in report["methods"] if name != VANILLA]
    taus = [cell_of(report, name, None)["tau"] for name in drafts]
    if not any(taus):
        return {}
    plots = {"tau": lambda: _tau(report, drafts)}
    if any(_positions(report, name) for name in drafts):
        plots["acceptance_by_position"] = lambda: _acceptance(report, drafts)

    speeds = [report["speed"][str(size)][name] for size in report["batch_sizes"] for name in drafts]
    if any(one["overall"]["speedup"] for one in speeds):
        plots["speedup"] = lambda: _speedup(report, drafts)
    if len(report["tasks"]) > 1:
        plots["tau_by_task"] = lambda: _tau_by_task(report, drafts)
    return plots


def _tau(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    """Draw a bar for each draft; its label has the tree and the figure."""
    labels = []
    for name in drafts:
        tau, tree = cell_of(report, name, None)["tau"], report["manifest"]["drafts"][name]["tree"]
        shown = "no forward" if tau is None else f"{tau:.2f}"
        tree = textwrap.shorten(tree, 28, placeholder="...")
        labels.append("\n".join([*textwrap.wrap(name, 28), f"{tree}: {shown}"]))
    most_lines = max(label.count("\n") + 1 for label in labels)
    height = 1.2 + (0.2 + 0.17 * most_lines) * len(drafts)

    figure, (axes,) = _new_figure(height=height)
    for place, (name, look) in enumerate(looks(drafts).items()):
        tau = cell_of(report, name, None)["tau"] or 0.0
        axes.barh(place, tau, 0.7, color=look.color, hatch=look.hatch, edgecolor="white")
    axes.set_yticks(range(len(drafts)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="tau, tokens per forward (dotted: plain decoding)", xlim=(0, None))
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.grid(axis="x", alpha=0.3)
    _title(figure, report)
    return figure


def _acceptance(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, panels = _new_figure(2, width=8.4)
    kinds = (
        ("hit_rate", "joint: positions 0..i all accepted"),
        ("conditional_hit_rate", "conditional: given 0..i-1 accepted"),
    )
    # Both panels have the same positions, and end where the data end.
    positions = {name: _positions(report, name) for name in drafts}
    for axes, (key, title) in zip(panels, kinds, strict=True):
        for name, look in looks(drafts).items():
            axes.plot(
                range(positions[name]),
                cell_of(report, name, None)[key][: positions[name]],
                label=name,
                color=look.color,
                marker=look.marker,
                linestyle=look.line,
                clip_on=False,  # or the axes would cut a marker that lies on them
            )
        axes.set(title=title, xlabel="draft position i", ylim=(0, 1.02))
        axes.set_xlim(-0.3, max(max(positions.values()), 2) - 0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of forwards accepted")
    _title(figure, report)
    _legend(figure, panels[0])
    return figure


def _positions(report: Mapping[str, Any], name: str) -> int:
    """Return how many positions of a draft have enough forwards that reach them."""
    cell = cell_of(report, name, None)
    reaching = [cell["target_forwards"], *cell["num_accepted_tokens_per_pos"]][:-1]
    accepted = cell["num_accepted_tokens_per_pos"]
    pairs = zip(reaching, accepted, strict=True)
    # Position 0 is drawn in any case where there is a forward.
    enough = itertools.takewhile(lambda pair: pair[0] >= _LEAST_FORWARDS, pairs)
    return max(sum(1 for _ in enough), min(1, len(cell["hit_rate"])))


def _speedup(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    sizes = sorted(report["batch_sizes"])
    figure, (axes,) = _new_figure(width=max(_WIDTH, 1.25 * len(sizes)))
    speeds = {name: [report["speed"][str(n)][name]["overall"] for n in sizes] for name in drafts}
    # A bar without height keeps the place of a figure that is missing.
    none = {"median": 0.0, "least": 0.0, "most": 0.0}
    spreads = {name: [one["speedup"] or none for one in cells] for name, cells in speeds.items()}
    medians = {name: [one["median"] for one in values] for name, values in spreads.items()}
    bounds = (("median", "least"), ("most", "median"))
    errors = {
        name: [[one[more] - one[less] for one in values] for more, less in bounds]
        for name, values in spreads.items()
    }
    _bars(axes, [str(size) for size in sizes], medians, errors)
    axes.set(xlabel="batch size (dotted: plain decoding)", ylabel="speed-up, x")
    _title(figure, report, report["manifest"]["hardware"]["device"])
    _legend(figure, axes)
    return figure


def _tau_by_task(report: Mapping[str, Any], drafts: Sequence[str]) -> Figure:
    tasks = report["tasks"]
    figure, (axes,) = _new_figure(width=max(_WIDTH, 1.25 * len(tasks)))
    taus = {name: [cell_of(report, name, task)["tau"] or 0.0 for task in tasks] for name in drafts}
    # One word a line, and the longest words broken.
    labels = [
        "\n".join(line for word in re.split("[-_ ]", task) for line in textwrap.wrap(word, 14))
        for task in tasks
    ]
    _bars(axes, labels, taus)
    axes.set_ylabel("tau, tokens per forward")
    _title(figure, report)
    _legend(figure, axes)
    return figure


def _new_figure(
    columns: int = 1, width: float = _WIDTH, height: float = _HEIGHT
) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    # Not pyplot: it keeps every figure, and may look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def _bars(
    axes: Axes,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float]],
    errors: Mapping[str, list[list[float]]] | None = None,
) -> None:
    """Draw a bar for each method in each group; errors are [down, up] of a method's bars."""
    width = 0.8 / len(heights)
    for number, (name, look) in enumerate(looks(heights).items()):
        # The bars of a group are side by side, with their middle at the group's place.
        offset = (number - (len(heights) - 1) / 2) * width
        axes.bar(
            [place + offset for place in range(len(groups))],
            heights[name],
            width * 0.92,
            label=name,
            color=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.5,
            yerr=errors and errors[name],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
    axes.axhline(1, color="black", linewidth=1, linestyle=":")  # plain decoding
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)


def _title(figure: Figure, report: Mapping[str, Any], *more: str) -> None:
    """Write above the figure what was measured: base, dtype, temperature, number of prompts."""
    manifest = report["manifest"]
    prompts = report["methods"][VANILLA]["overall"]["rows"]
    temperature = manifest["flags"].get("temperature")
    parts = [
        f"{manifest['base']['source']}, {manifest['dtype']}",
        f"temperature {0 if temperature is None else temperature:g}",
        f"{prompts} prompt" + "s" * (prompts != 1),
        *more,
    ]
    characters = int(figure.get_figwidth() / _INCHES_PER_CHARACTER)
    figure.suptitle(textwrap.fill(", ".join(parts), characters), fontsize=10)


def _legend(figure: Figure, axes: Axes) -> None:
    """Write the methods below the figure's title, as many in a row as fit."""
    # "outside" makes room in height only, so names are folded and columns counted to fit the width.
    handles, names = axes.get_legend_handles_labels()
    width = figure.get_figwidth()
    names = [textwrap.fill(name, int(width / _INCHES_PER_CHARACTER) - 8) for name in names]
    longest = max(len(line) for name in names for line in name.splitlines())
    fitting = int(width / (_INCHES_PER_CHARACTER * (longest + 8)))  # 8: the sample of the line
    columns = min(max(fitting, 1), 4)
    # Rows of the legend must not take their height from the axes.
    lines = sum(name.count("\n") + 1 for name in names) / columns
    figure.set_figheight(figure.get_figheight() + 0.2 * (lines - 1))
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.4
    )
