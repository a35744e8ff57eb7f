"""The report: report.json, report.md and plots/ of a run's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.evaluation import accuracy
from clover_jax.evaluation.equality import Comparisons, Divergence, summarize
from clover_jax.evaluation.markdown import report_text, speed_of
from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.options import VANILLA, display_name
from clover_jax.evaluation.passes import Evaluation
from clover_jax.evaluation.plots import draw_plots
from clover_jax.evaluation.stage_times import METHOD, StageTimes
from clover_jax.evaluation.timed_passes import TimedPass, speed, split_rounds
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.jsonl import plain_values, read_rows
from clover_jax.training.metrics import EVAL, METRICS, comparable
from clover_jax.training.settings import recorded_settings

FORMAT = 1
JSON, MARKDOWN, PLOTS = "report.json", "report.md", "plots"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements made after decoding; of drafts by name, then by row.

    comparisons, divergences: against plain decoding's text. hits: of each row's turns.
    times: of a step, plain decoding's too; empty where no row had text.
    """

    comparisons: Mapping[str, Comparisons]
    divergences: Mapping[str, Mapping[int, Divergence]]
    hits: Mapping[str, Mapping[int, list[accuracy.Hits]]]
    times: Mapping[str, StageTimes]


def build_report(
    manifest: dict[str, Any], evaluation: Evaluation, measured: Measured
) -> dict[str, Any]:
    """Return the report as JSON values, its manifest completed by the revisions of the code."""
    # Only passes of this plan count: the journal may hold other batch sizes of earlier commands.
    plan, methods, journal = evaluation.plan, evaluation.methods, evaluation.journal
    tasks = list(plan.tasks)
    passes = journal.of(evaluation.keys)
    # Without the first method, which is plain decoding.
    training = {method.name: _training(method.source) for method in methods[1:]}
    times = measured.times
    steps = {name: one.to_dict(times[VANILLA]) for name, one in times.items()}
    report = {
        "format": FORMAT,
        "manifest": manifest | {"git_revision": _revisions(passes, journal.origin.revision)},
        "tasks": tasks,
        "sampling": plan.sampling.to_dict(),
        "is_equality_expected": plan.is_equality_expected,
        "batch_sizes": list(plan.batch_sizes),
        "repeats": plan.repeats,
        "methods": {
            method.name: {
                "overall": _cell(method, evaluation, measured, None),
                "tasks": {task: _cell(method, evaluation, measured, task) for task in tasks},
                "step": steps.get(method.name),
            }
            for method in methods
        },
        "speed": {str(size): _speeds(evaluation, size, passes) for size in plan.batch_sizes},
        "sessions": sorted({one.origin.session for one in passes}),
        "split_turns": split_rounds(passes),
        "step_timing": METHOD,
        "training": {name: rows for name, rows in training.items() if rows},
        "divergences": {
            name: [dataclasses.asdict(one) for one in by_row.values()]
            for name, by_row in measured.divergences.items()
        },
    }
    # From the figures themselves, so that the report cannot contradict them.
    report["problems"] = problems(report)
    return plain_values(report)


def problems(report: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the run fails, a line each."""
    # A failed row is a problem for any method; a differing text only where equality is expected.
    lines = []
    for name, cells in report["methods"].items():
        shown, failed = display_name(name), cells["overall"]["failed"]
        if failed:
            lines.append(f"{shown}: {failed} of {cells['overall']['rows']} rows failed")

        later = sum(speeds[name]["overall"]["rows_failed"] for speeds in report["speed"].values())
        if later:
            lines.append(f"{shown}: rows failed in a later pass, {later} in all")

        mismatches = cells["overall"].get("equality", {}).get("mismatches", 0)
        if mismatches and report["is_equality_expected"]:
            lines.append(f"{name}: {mismatches} rows differ from plain decoding by more than ties")
    return lines


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write report.json, then what is drawn from it."""
    # report.json first: the page and the plots can be drawn again from it.
    write_json(directory / JSON, report)
    plots = draw_plots(report, directory / PLOTS)
    write_text(directory / MARKDOWN, report_text(report, plots))


def key_figures(report: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the last line of the command's output."""
    # One line for scripts: overall figures, at the first batch size.
    overall = {name: cells["overall"] for name, cells in report["methods"].items()}
    drafts = [name for name in overall if name != VANILLA]
    plain = overall[VANILLA]
    equality = {name: overall[name]["equality"] for name in drafts}

    return {
        "output": directory,
        "rows": plain["rows"],
        "failed": max(one["failed"] for one in overall.values()),
        "skipped": plain["skipped"],
        "truncated": plain["truncated"],
        "tau": {name: overall[name]["tau"] for name in drafts},
        "speedup": {
            name: (speed_of(report, name, None)["speedup"] or {}).get("median") for name in drafts
        },
        **{
            key: {name: counts[key] for name, counts in equality.items()}
            for key in ("equal", "near_ties", "mismatches")
        },
        "problems": report["problems"],
    }


def _cell(
    method: Method, evaluation: Evaluation, measured: Measured, task: str | None
) -> dict[str, Any]:
    """Return a method's figures on one task, or on all."""
    # First the figures of rows alone, then those that need plain decoding's text.
    cell = evaluation.files[method.name].tally(task).to_dict()
    if method.name == VANILLA:
        return cell

    plan = evaluation.plan
    # Rows are compared with plain decoding's rows of the same prompts.
    chosen = plan.prompts if task is None else plan.tasks[task]
    numbers = [prompt.index for prompt in chosen]
    comparisons = measured.comparisons[method.name]
    divergences = measured.divergences[method.name]
    cell["equality"] = summarize(
        [comparisons[number] for number in numbers],
        [divergences[number] for number in numbers if number in divergences],
    )
    # Hits are added up turn by turn: each turn of a row counts.
    hits = [one for number in numbers for one in measured.hits[method.name][number]]
    cell["accuracy"] = accuracy.total(hits).to_dict() if hits else None
    return cell


def _speeds(evaluation: Evaluation, size: int, passes: Sequence[TimedPass]) -> dict[str, Any]:
    """Return each method's speed at a batch size, over all tasks and on each."""

    # Without a task all passes count: tokens and seconds are added up before they are divided.
    def of(method: str, task: str | None) -> list[TimedPass]:
        at_size = (one for one in passes if one.key.batch_size == size)
        mine = (one for one in at_size if one.key.method == method)
        return [one for one in mine if task in (None, one.key.task)]

    def measured(method: str, task: str | None) -> dict[str, Any]:
        return speed(of(method, task), of(VANILLA, task))

    return {
        method.name: {
            "overall": measured(method.name, None),
            "tasks": {task: measured(method.name, task) for task in evaluation.plan.tasks},
        }
        for method in evaluation.methods
    }


def _revisions(passes: Iterable[TimedPass], here: str | None) -> str | None:
    """Return the revisions of the code that timed the passes and of this, the oldest first."""
    # Sessions are numbered in order. The revision that writes the page comes last if it is new.
    by_age = sorted((one.origin for one in passes), key=lambda origin: origin.session)
    revisions = dict.fromkeys([*(origin.revision for origin in by_age), here])
    if set(revisions) <= {None}:
        return None
    return ", ".join(revision or "unknown" for revision in revisions)


def _training(source: str | None) -> list[dict[str, Any]]:
    """Return step, tokens, seconds and tau of the measurements in training of a draft in a workdir.

    Of a run that was continued with other prompts or another tree, the newest comparable ones.
    Tokens are those of all batches so far, seconds what these took without compiling, saving and
    measuring. Both are left out where the run's settings are not there, seconds of steps that its
    log does not reach, too.
    """
    # A draft is named by its workdir or by a folder in it, such as best/.
    assert source is not None  # a draft comes from somewhere
    folder = Path(source).expanduser()
    workdirs = [place for place in (folder, folder.parent) if (place / EVAL).is_file()]
    if not workdirs:
        return []

    settings = recorded_settings(workdirs[0])
    measured = comparable(list(read_rows(workdirs[0] / EVAL)))
    rows = [{"step": row["step"], "tau": row["tau"]} for row in measured]
    if settings is None:
        return rows
    # Padding is counted, as in the log's tokens per second.
    size = settings.batch_size * settings.seq_len
    rows = [row | {"tokens": row["step"] * size} for row in rows]

    # A row of the log has the rate since the row before; it is rounded to a tenth.
    log = workdirs[0] / METRICS
    logged = list(read_rows(log)) if log.is_file() else []
    # Seconds from row to row, added up: [0, s_1, s_1 + s_2, ...] at these steps.
    steps = [0, *(row["step"] for row in logged)]
    rates = [max(row["tokens_per_second"], 0.1) for row in logged]
    seconds = np.cumsum([0, *(np.diff(steps) * size / rates)])
    return [
        row | {"seconds": round(float(np.interp(row["step"], steps, seconds)), 1)}
        if row["step"] <= steps[-1]
        else row
        for row in rows
    ]
