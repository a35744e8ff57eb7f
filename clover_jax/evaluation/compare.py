"""Two reports side by side: tables, and differences of their conditions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.errors import UserError
from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.page import EQUAL, cell_of, figures_of, groups, speed_of, table
from clover_jax.evaluation.report import FORMAT, JSON
from clover_jax.runtime.files import read_json_object, write_json, write_text
from clover_jax.runtime.jsonl import plain_values

Values = Mapping[str, Any]  # of a report.json
# Keys that a report must have, since the page reads them.
_NEEDED = {"manifest", "methods", "tasks", "speed", "batch_sizes"}


class Column(NamedTuple):
    """One draft of one report: its name on the page, the report, and its name there."""

    name: str
    report: Values
    method: str


def compare_reports(names: str, output: str | None) -> dict[str, Any]:
    """Print two reports side by side and return their key figures.

    names: "A,B", each a folder with a report.json or such a file. output: a folder for the page
    and its values; None writes nothing.
    Differences of the conditions are listed on stderr and on the page.
    """
    parts = [name.strip() for name in names.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UserError(f"--compare={names}: expected two reports, A,B")
    paths = [Path(part).expanduser() for part in parts]
    paths = [path / JSON if path.is_dir() else path for path in paths]
    reports = [_read(path) for path in paths]
    # Folders name the reports, unless both have the same name.
    folders = [path.resolve().parent.name for path in paths]
    labels = folders if folders[0] != folders[1] else ["A", "B"]

    differing = differences(*reports)
    for kind, title in _KINDS.items():
        for line in differing[kind]:
            print(f"{title}: {line}", file=sys.stderr)
    columns = [
        Column(f"{label}: {method}", report, method)
        for label, report in zip(labels, reports, strict=True)
        for method in report["methods"]
        if method != VANILLA
    ]
    # Tasks of either report; a draft has dashes where its report lacks the task.
    tasks = list(dict.fromkeys(task for report in reports for task in report["tasks"]))
    page = _page(" against ".join(labels), columns, tasks, differing)
    print(page)

    speeds = {one.name: speed_of(one.report, one.method, None)["speedup"] for one in columns}
    result = {
        "reports": dict(zip(labels, map(str, paths), strict=True)),
        "differences": differing,
        "tau": {one.name: cell_of(one.report, one.method, None)["tau"] for one in columns},
        "speedup": {name: (speed or {}).get("median") for name, speed in speeds.items()},
    }
    if output is not None:
        folder = Path(output).expanduser()
        write_json(folder / "compare.json", plain_values(result))
        write_text(folder / "compare.md", page + "\n")
    return result


_KINDS = {"texts": "not the same texts", "times": "not the same conditions for times"}

# Flags that change texts; the others change times at most.
_TEXT_FLAGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "verify", "draft_sampling", "stop"),
    *("ignore_eos", "context_overflow", "seed"),
)
_TIME_ENTRIES = {
    "flags": ("mesh", "int8"),
    "hardware": ("device", "num_devices", "processor", "cores"),
    "versions": ("jax", "jaxlib"),
}


def differences(one: Values, other: Values) -> dict[str, list[str]]:
    """Return differences of conditions: "texts" invalidate all comparisons, "times" only speeds."""
    # Reports of earlier versions do not have these.
    known = one["manifest"]["base"].keys() & other["manifest"]["base"].keys()
    unknown = {f"base {name}" for name in {"config", "chat_template"} - known}

    ours, theirs = _conditions(one), _conditions(other)
    return {
        kind: [
            f"{name} {value} against {theirs[kind][name]}"
            for name, value in values.items()
            if value != theirs[kind][name] and name not in unknown
        ]
        for kind, values in ours.items()
    }


def _conditions(report: Values) -> dict[str, dict[str, Any]]:
    manifest, base = report["manifest"], report["manifest"]["base"]
    flags = manifest["flags"]
    texts = {
        # Hashes are cut, because differences are printed.
        "base": base["hash"][:12],
        "base params": base.get("params"),
        "base config": str(base.get("config"))[:12],
        "base chat_template": str(base.get("chat_template"))[:12],
        "prompts": manifest["prompts"]["hash"][:12],
        "dtype": manifest["dtype"],
        # A quantized head changes drafts, but no text.
        "int8 base": "base" in (flags.get("int8") or ()),
        **{name: flags.get(name) for name in _TEXT_FLAGS},
    }
    times = {"batch_size": report["batch_sizes"][0], "git revision": manifest["git_revision"]}
    for part, names in _TIME_ENTRIES.items():
        times |= {name: manifest[part].get(name) for name in names}
    return {"texts": texts, "times": times}


def _read(path: Path) -> Values:
    values = read_json_object(path)
    if values.get("format") != FORMAT or not values.keys() >= _NEEDED:
        raise UserError(
            f"{path} is not a report of evaluate, or not of format {FORMAT}; give the output "
            "folder of evaluate"
        )
    return values


def _page(
    title: str, columns: Sequence[Column], tasks: Sequence[str], differing: Mapping[str, list[str]]
) -> str:
    # Differences of the conditions come first.
    parts = [f"# {title}"]
    if differing["texts"]:
        parts.append(f"**Not the same texts: {'; '.join(differing['texts'])}.**")
    if differing["times"]:
        parts.append(f"Not the same conditions for times: {'; '.join(differing['times'])}.")

    # One table for each figure, so that the drafts of both reports are side by side.
    for figure in ("tau", "speed-up", "tokens/s", EQUAL):
        rows = []
        for task in groups(tasks):
            texts = (figures_of(one.report, one.method, task)[figure] for one in columns)
            rows.append([task or "overall", *texts])
        parts += [f"## {figure}", table(["task", *(column.name for column in columns)], rows)]
    return "\n\n".join(parts)
