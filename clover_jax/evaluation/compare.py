"""Two reports side by side: tables, a plot, and differences of their conditions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
from clover_jax.evaluation.markdown import EQUAL, FIGURES, cell_of, groups, speed_of, table
from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.report import FORMAT, JSON
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.jsonl import plain_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[str, Any]  # of a report.json
# Keys that a report must have, since the page reads them.
_NEEDED = {"manifest", "methods", "tasks", "speed", "batch_sizes"}


class Report(NamedTuple):
    """A report, its file, and the name that it goes by."""

    name: str
    path: Path
    values: Values


class Column(NamedTuple):
    """One draft of one report."""

    name: str
    report: Report
    method: str

    def cell(self, task: str | None) -> Mapping[str, Any]:
        """Return its figures on a task, or overall; empty where its report has no such task."""
        return cell_of(self.report.values, self.method, task)

    def speed(self, task: str | None) -> Mapping[str, Any]:
        """Return its speed on a task, or overall, at the report's first batch size."""
        return speed_of(self.report.values, self.method, task)


def compare_reports(names: str, output: str | None) -> dict[str, Any]:
    """Print two reports side by side and return their key figures.

    names: "A,B", each a folder with a report.json or such a file. output: a folder for the page,
    its values and its plot; None writes nothing.
    Differences in what was measured are listed on stderr and in the page.
    Raises UserError for names that are not two reports.
    """
    reports = _read_both(names)
    differing = differences(*(report.values for report in reports))
    for kind, title in _KINDS.items():
        for line in differing[kind]:
            print(f"{title}: {line}", file=sys.stderr)

    columns = [
        Column(f"{report.name}: {method}", report, method)
        for report in reports
        for method in report.values["methods"]
        if method != VANILLA
    ]
    # Tasks of either report; a draft has dashes where its report lacks the task.
    tasks = list(dict.fromkeys(task for report in reports for task in report.values["tasks"]))
    page = _page(reports, columns, tasks, differing)
    print(page)

    result = {
        "reports": {report.name: str(report.path) for report in reports},
        "differences": differing,
        "tau": {column.name: column.cell(None)["tau"] for column in columns},
        "speedup": {
            column.name: (column.speed(None)["speedup"] or {}).get("median") for column in columns
        },
    }
    # The page is printed in any case; a folder is written only where the user names one.
    if output is not None:
        folder = Path(output).expanduser()
        # Without a draft there is nothing to plot.
        picture = save("compare", lambda: _plot(columns, tasks), folder) if columns else None
        write_json(folder / "compare.json", plain_values(result))
        shown = f"\n\n![{picture.stem}]({picture.name})" if picture else ""
        write_text(folder / "compare.md", page + shown + "\n")
    return result


_KINDS = {"texts": "not the same texts", "times": "not the same conditions for times"}

# Where reports differ in these flags, their texts differ; in the others at most their times.
_TEXT_FLAGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "verify", "draft_sampling", "stop"),
    *("ignore_eos", "context_overflow", "seed"),
)


def differences(one: Values, other: Values) -> dict[str, list[str]]:
    """Return differences of conditions: "texts" invalidate all comparisons, "times" only speeds."""
    # Reports of earlier versions lack these, so nothing is known of them.
    known = one["manifest"]["base"].keys() & other["manifest"]["base"].keys()
    unknown = {f"base {name}" for name in {"config", "chat_template"} - known}

    differing = {}
    for kind, conditions in (("texts", _text_conditions), ("times", _time_conditions)):
        pairs = zip(conditions(one).items(), conditions(other).values(), strict=True)
        differing[kind] = [
            f"{name} {a} against {b}" for (name, a), b in pairs if a != b and name not in unknown
        ]
    return differing


def _text_conditions(report: Values) -> dict[str, Any]:
    # What decides a text: weights, config, template, prompts, precision, sampling.
    manifest, base = report["manifest"], report["manifest"]["base"]
    flags = manifest["flags"]
    return {
        # Hashes are cut, because differences are printed.
        "base": base["hash"][:12],
        "base params": base.get("params"),
        "base config": str(base.get("config"))[:12],
        "base chat_template": str(base.get("chat_template"))[:12],
        "prompts": manifest["prompts"]["hash"][:12],
        "dtype": manifest["dtype"],
        # A quantized base writes its own text; a quantized head changes only what is drafted.
        "int8 base": "base" in (flags.get("int8") or ()),
        **{name: flags.get(name) for name in _TEXT_FLAGS},
    }


def _time_conditions(report: Values) -> dict[str, Any]:
    # What decides a time: batch, code, mesh, machine, versions.
    manifest = report["manifest"]
    read = {
        "flags": ("mesh", "int8"),
        "hardware": ("device", "num_devices", "processor", "cores"),
        "versions": ("jax", "jaxlib"),
    }
    return {
        "batch_size": report["batch_sizes"][0],
        "git revision": manifest["git_revision"],
        **{name: manifest[part].get(name) for part, names in read.items() for name in names},
    }


def _read_both(names: str) -> list[Report]:
    # A folder stands for the report in it.
    parts = [name.strip() for name in names.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UserError(f"--compare={names}: give two reports, A,B")
    paths = [Path(part).expanduser() for part in parts]
    paths = [path / JSON if path.is_dir() else path for path in paths]

    # Folders name the reports, unless they are called the same.
    folders = [path.resolve().parent.name for path in paths]
    labels = folders if folders[0] != folders[1] else ["A", "B"]
    return [Report(label, path, _read(path)) for label, path in zip(labels, paths, strict=True)]


def _read(path: Path) -> Values:
    values = read_json_object(path)
    # The file may hold any JSON object.
    if values.get("format") != FORMAT or not values.keys() >= _NEEDED:
        raise UserError(
            f"{path} is no report of evaluate, or of another format than {FORMAT}; give the "
            "output folder of evaluate"
        )
    return values


def _page(
    reports: Sequence[Report],
    columns: Sequence[Column],
    tasks: Sequence[str],
    differing: Mapping[str, Sequence[str]],
) -> str:
    # What spoils the comparison stands above the figures.
    parts = [f"# {reports[0].name} against {reports[1].name}"]
    if differing["texts"]:
        parts.append(f"**Not the same texts: {'; '.join(differing['texts'])}.**")
    if differing["times"]:
        parts.append(f"Not the same conditions for times: {'; '.join(differing['times'])}.")

    # One table for each figure, so that the drafts of both reports stand side by side.
    for title in ("tau", "speed-up", "tokens/s", EQUAL):
        text = FIGURES[title]
        rows = [
            [task or "overall", *(text(each.cell(task), each.speed(task)) for each in columns)]
            for task in groups(tasks)
        ]
        parts += [f"## {title}", table(["task", *(column.name for column in columns)], rows)]
    return "\n\n".join(parts)


def _plot(columns: Sequence[Column], tasks: Sequence[str]) -> Figure:
    # Tasks side by side: tau above, speed-up below.
    places = groups(tasks)
    figure, (upper, lower) = new_figure(rows=2, width=max(WIDTH, 1.25 * len(places)))
    labels = [task or "overall" for task in places]
    taus = {
        column.name: [column.cell(task).get("tau") or 0.0 for task in places] for column in columns
    }
    speedups = {
        column.name: [column.speed(task)["speedup"] for task in places] for column in columns
    }
    draw_bars(upper, labels, taus)
    draw_spreads(lower, labels, speedups)

    upper.set_ylabel("tau, tokens a forward")
    lower.set_ylabel("speed-up over plain decoding, x")
    for axes in (upper, lower):
        mark_plain_decoding(axes)
    legend(figure, upper)
    return figure
