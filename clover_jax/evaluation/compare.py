"""Two reports side by side: a table, a plot, and what makes them incomparable."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.errors import UserError
from clover_jax.evaluation.drawing import (
    WIDTH,
    draw_bars,
    draw_spreads,
    legend,
    mark_plain_decoding,
    new_figure,
    save,
)
from clover_jax.evaluation.markdown import number, spread, table
from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.report import FORMAT, JSON
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.jsonl import plain_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where reports differ in these flags, their texts differ; in the others at most their times.
_TEXT_FLAGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "verify", "draft_sampling", "stop"),
    *("ignore_eos", "context_overflow", "seed"),
)
_NEEDED = {"manifest", "methods", "tasks", "speed", "batch_sizes"}


class Report(NamedTuple):
    """A report and the name that it goes by."""

    name: str
    values: Mapping[str, Any]


class Column(NamedTuple):
    """One draft of one report."""

    name: str
    report: Report
    method: str

    def cell(self, task: str | None) -> Mapping[str, Any] | None:
        """Return its figures on a task, or overall; None where its report has no such task."""
        cells = self.report.values["methods"][self.method]
        return cells["overall"] if task is None else cells["tasks"].get(task)

    def speed(self, task: str | None) -> Mapping[str, Any]:
        """Return its speed on a task, or overall, at the report's first batch size."""
        values = self.report.values
        speeds = values["speed"][str(values["batch_sizes"][0])][self.method]
        empty = {"speedup": None, "tokens_per_second": None}
        return speeds["overall"] if task is None else speeds["tasks"].get(task, empty)


def compare(names: str, output: str | None) -> dict[str, Any]:
    """Print two reports side by side and return their key figures.

    names: "A,B", each a folder with a report.json or such a file. output: a folder for the page,
    its values and its plot; None writes nothing.
    What the reports do not have in common is said on stderr and in the page.
    """
    reports = _read_both(names)
    found = differences(*(report.values for report in reports))
    for line in found["texts"]:
        print(f"not the same texts: {line}", file=sys.stderr)
    for line in found["times"]:
        print(f"not the same conditions for times: {line}", file=sys.stderr)
    columns = [
        Column(f"{report.name}: {method}", report, method)
        for report in reports
        for method in report.values["methods"]
        if method != VANILLA
    ]
    tasks = list(dict.fromkeys(task for report in reports for task in report.values["tasks"]))
    page = _page(reports, columns, tasks, found)
    print(page)
    result = {
        "reports": {
            report.name: str(path) for report, path in zip(reports, _paths(names), strict=True)
        },
        "differences": found,
        "tau": {column.name: column.cell(None)["tau"] for column in columns},
        "speedup": {
            column.name: (column.speed(None)["speedup"] or {}).get("median") for column in columns
        },
    }
    if output is not None:
        _write(Path(output).expanduser(), page, result, columns, tasks)
    return result


def differences(*reports: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what two reports do not share: "texts" spoils every comparison, "times" speeds."""
    one, other = (report["manifest"] for report in reports)
    texts = {
        "base": [manifest["base"]["hash"][:12] for manifest in (one, other)],
        "base params": [manifest["base"].get("params") for manifest in (one, other)],
        **{
            f"base {name}": [str(manifest["base"][name])[:12] for manifest in (one, other)]
            for name in ("config", "chat_template")
            if name in one["base"] and name in other["base"]  # older reports lack some
        },
        "prompts": [manifest["prompts"]["hash"][:12] for manifest in (one, other)],
        "dtype": [manifest["dtype"] for manifest in (one, other)],
        # A rounded base writes its own text; a rounded head changes only what is drafted.
        "int8 base": ["base" in (manifest["flags"].get("int8") or ()) for manifest in (one, other)],
        **{
            name: [manifest["flags"].get(name) for manifest in (one, other)] for name in _TEXT_FLAGS
        },
    }
    times = {
        "batch_size": [report["batch_sizes"][0] for report in reports],
        **{
            name: [manifest["flags"].get(name) for manifest in (one, other)]
            for name in ("mesh", "int8")
        },
        "git revision": [manifest["git_revision"] for manifest in (one, other)],
        **{
            name: [manifest["hardware"].get(name) for manifest in (one, other)]
            for name in ("device", "num_devices", "processor", "cores")
        },
        **{
            name: [manifest["versions"].get(name) for manifest in (one, other)]
            for name in ("jax", "jaxlib")
        },
    }
    return {
        kind: [f"{name} {a} against {b}" for name, (a, b) in pairs.items() if a != b]
        for kind, pairs in (("texts", texts), ("times", times))
    }


def _paths(names: str) -> list[Path]:
    paths = [Path(name.strip()).expanduser() for name in names.split(",")]
    if len(paths) != 2 or not all(name.strip() for name in names.split(",")):
        raise UserError(f"--compare={names}: give two reports, A,B")
    return [path / JSON if path.is_dir() else path for path in paths]


def _read_both(names: str) -> list[Report]:
    paths = _paths(names)
    reports = []
    for path, fallback in zip(paths, "AB", strict=True):
        values = read_json_object(path)
        if values.get("format") != FORMAT or not values.keys() >= _NEEDED:
            raise UserError(
                f"{path} is no report of evaluate, or of another format than {FORMAT}; give the "
                "output folder of evaluate"
            )
        folders = [other.resolve().parent.name for other in paths]
        is_telling = len(set(folders)) == len(folders)
        reports.append(Report(path.resolve().parent.name if is_telling else fallback, values))
    return reports


def _page(
    reports: list[Report],
    columns: list[Column],
    tasks: list[str],
    found: Mapping[str, list[str]],
) -> str:
    names = [report.name for report in reports]
    parts = [f"# {names[0]} against {names[1]}"]
    if found["texts"]:
        parts.append(f"**Not the same texts: {'; '.join(found['texts'])}.**")
    if found["times"]:
        parts.append(f"Not the same conditions for times: {'; '.join(found['times'])}.")
    header = ["task", *(column.name for column in columns)]
    rows = [(task or "overall", task) for task in (None, *tasks)]
    for title, shown in (
        ("tau", lambda column, task: number((column.cell(task) or {}).get("tau"))),
        ("speed-up", lambda column, task: spread(column.speed(task)["speedup"], 2, "x")),
        ("tokens/s", lambda column, task: spread(column.speed(task)["tokens_per_second"], 0)),
        ("rows equal to vanilla", lambda column, task: _equal(column.cell(task))),
    ):
        cells = [[name, *(shown(column, task) for column in columns)] for name, task in rows]
        parts += [f"## {title}", table(header, cells)]
    return "\n\n".join(parts)


def _equal(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return number(None)
    return f"{cell['equality']['equal']} of {cell['equality']['compared']}"


def _write(
    folder: Path, page: str, result: dict[str, Any], columns: list[Column], tasks: list[str]
) -> None:
    picture = save("compare", lambda: _plot(columns, tasks), folder) if columns else None
    write_json(folder / "compare.json", plain_values(result))
    shown = f"\n\n![{picture.stem}]({picture.name})" if picture else ""
    write_text(folder / "compare.md", page + shown + "\n")


def _plot(columns: list[Column], tasks: list[str]) -> Figure:
    groups = [None, *tasks]
    figure, (upper, lower) = new_figure(rows=2, width=max(WIDTH, 1.25 * len(groups)))
    labels = [task or "overall" for task in groups]
    taus = {c.name: [(c.cell(task) or {}).get("tau") or 0.0 for task in groups] for c in columns}
    speedups = {c.name: [c.speed(task)["speedup"] for task in groups] for c in columns}
    draw_bars(upper, labels, taus)
    draw_spreads(lower, labels, speedups)
    upper.set_ylabel("tau, tokens a forward")
    lower.set_ylabel("speed-up over plain decoding, x")
    for axes in (upper, lower):
        mark_plain_decoding(axes)
    legend(figure, upper)
    return figure
