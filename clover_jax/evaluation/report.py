"""The report: report.json, report.md and plots/ of a run's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.evaluation import accuracy
from clover_jax.evaluation.equality import Divergence, summarize
from clover_jax.evaluation.judging import Comparisons
from clover_jax.evaluation.legs import Leg, LegJournal, speed, split_turns
from clover_jax.evaluation.markdown import report_text
from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.options import VANILLA, display_name
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.plots import draw_plots
from clover_jax.evaluation.row_files import RowFile
from clover_jax.evaluation.stage_times import METHOD, StageTimes
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.jsonl import plain_values, read_rows
from clover_jax.training.metrics import EVAL, comparable
from clover_jax.training.settings import recorded_settings

FORMAT = 1
JSON, MARKDOWN, PLOTS = "report.json", "report.md", "plots"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Everything measured; of drafts by name, then by row.

    files, journal: rows and legs. comparisons, divergences: against plain decoding's text.
    hits: of each row's turns. times: of a step, plain decoding's too; empty where no row had text.
    """

    files: Mapping[str, RowFile]
    journal: LegJournal
    comparisons: Mapping[str, Comparisons]
    divergences: Mapping[str, Mapping[int, Divergence]]
    hits: Mapping[str, Mapping[int, list[accuracy.Hits]]]
    times: Mapping[str, StageTimes]


def build_report(
    manifest: dict[str, Any], methods: Sequence[Method], plan: Plan, measured: Measured
) -> dict[str, Any]:
    """Return the report as JSON values; what is measured adds the code's revision to `manifest`."""
    tasks = list(plan.tasks)
    cells = {
        method.name: {
            "overall": _cell(method, plan, measured, None),
            "tasks": {task: _cell(method, plan, measured, task) for task in tasks},
            "step": _step(method, measured),
        }
        for method in methods
    }
    legs = measured.journal.of(list(plan.legs(methods)))
    report = {
        "format": FORMAT,
        "manifest": manifest | {"git_revision": _revisions(legs, measured.journal.revision)},
        "tasks": tasks,
        "sampling": plan.sampling.to_dict(),
        "is_equality_expected": plan.is_equality_expected,
        "batch_sizes": list(plan.batch_sizes),
        "repeats": plan.repeats,
        "methods": cells,
        "speed": {str(size): _speeds(methods, tasks, size, legs) for size in plan.batch_sizes},
        "sessions": sorted({leg.session for leg in legs}),
        "split_turns": split_turns(legs),
        "step_timing": METHOD,
        "training": {m.name: found for m in methods[1:] if (found := _training(m.source))},
        "divergences": {
            name: [
                dataclasses.asdict(one)
                for one in sorted(found.values(), key=lambda one: not one.is_mismatch)
            ]
            for name, found in measured.divergences.items()
        },
    }
    report["problems"] = problems(report)
    return plain_values(report)


def problems(report: Mapping[str, Any]) -> list[str]:
    """Return what makes the run fail, a line each."""
    found = []
    for name, cells in report["methods"].items():
        shown, failed = display_name(name), cells["overall"]["failed"]
        if failed:
            found.append(f"{shown}: {failed} of {cells['overall']['rows']} rows failed")
        later = sum(speeds[name]["overall"]["rows_failed"] for speeds in report["speed"].values())
        if later:
            found.append(f"{shown}: rows failed in a later pass, {later} in all")
        mismatches = cells["overall"].get("equality", {}).get("mismatches", 0)
        if mismatches and report["is_equality_expected"]:
            found.append(f"{name}: {mismatches} rows differ from plain decoding by more than ties")
    return found


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write report.json, then what is drawn from it."""
    write_json(directory / JSON, report)
    plots = draw_plots(report, directory / PLOTS)
    write_text(directory / MARKDOWN, report_text(report, plots))


def key_figures(report: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the last line of the command's output."""
    overall = {name: cells["overall"] for name, cells in report["methods"].items()}
    speeds = report["speed"][str(report["batch_sizes"][0])]
    drafts = [name for name in overall if name != VANILLA]
    plain = overall[VANILLA]
    return {
        "output": directory,
        "rows": plain["rows"],
        "failed": max(one["failed"] for one in overall.values()),
        "skipped": plain["skipped"],
        "truncated": plain["truncated"],
        "tau": {name: overall[name]["tau"] for name in drafts},
        "speedup": {
            name: (speeds[name]["overall"]["speedup"] or {}).get("median") for name in drafts
        },
        "equal": {name: overall[name]["equality"]["equal"] for name in drafts},
        "near_ties": {name: overall[name]["equality"]["near_ties"] for name in drafts},
        "mismatches": {name: overall[name]["equality"]["mismatches"] for name in drafts},
        "problems": report["problems"],
    }


def _cell(method: Method, plan: Plan, measured: Measured, task: str | None) -> dict[str, Any]:
    """Return a method's figures on one task, or on all."""
    cell = measured.files[method.name].tally(task).to_dict()
    if method.name == VANILLA:
        return cell
    chosen = plan.prompts if task is None else plan.tasks[task]
    numbers = [prompt.index for prompt in chosen]
    comparisons = measured.comparisons[method.name]
    divergences = measured.divergences[method.name]
    cell["equality"] = summarize(
        [comparisons[number] for number in numbers],
        [divergences[number] for number in numbers if number in divergences],
    )
    hits = [one for number in numbers for one in measured.hits[method.name][number]]
    cell["accuracy"] = accuracy.total(hits).to_dict() if hits else None
    return cell


def _step(method: Method, measured: Measured) -> dict[str, Any] | None:
    times = measured.times.get(method.name)
    return times.to_dict(measured.times[VANILLA]) if times else None


def _speeds(methods: Sequence[Method], tasks: Sequence[str], size: int, legs: Iterable) -> dict:
    legs = [leg for leg in legs if leg.batch_size == size]

    def of(name: str, task: str | None) -> list:
        return [leg for leg in legs if leg.method == name and task in (None, leg.task)]

    return {
        method.name: {
            "overall": speed(of(method.name, None), of(VANILLA, None)),
            "tasks": {task: speed(of(method.name, task), of(VANILLA, task)) for task in tasks},
        }
        for method in methods
    }


def _revisions(legs: Iterable[Leg], here: str | None) -> str | None:
    """Return the revisions of the code that timed the passes and of this, the oldest first."""
    by_age = sorted(legs, key=lambda leg: leg.session)
    found = dict.fromkeys([*(leg.revision for leg in by_age), here])
    if set(found) <= {None}:
        return None
    return ", ".join(revision or "unknown" for revision in found)


def _training(source: str | None) -> list[dict[str, Any]]:
    """Return step, tokens and tau of the measurements in training of a draft in a workdir.

    Of a run that was taken up with other prompts or another tree, the newest comparable ones.
    Tokens are those of all batches so far; left out where the run's settings are not there.
    """
    folder = Path(source).expanduser()
    for workdir in (folder, folder.parent):
        if not (workdir / EVAL).is_file():
            continue
        settings = recorded_settings(workdir)
        measured = comparable(list(read_rows(workdir / EVAL)))
        rows = [{"step": row["step"], "tau": row["tau"]} for row in measured]
        if settings is None:
            return rows
        size = settings.batch_size * settings.seq_len
        return [row | {"tokens": row["step"] * size} for row in rows]
    return []
