"""The report: report.json with a run's figures and manifest, then report.md and plots/."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from clover_jax.decoding.models import identity_of
from clover_jax.decoding.tree_config import portable_name
from clover_jax.evaluation import accuracy
from clover_jax.evaluation.equality import Comparisons, Divergence, summarize
from clover_jax.evaluation.options import VANILLA, display_name
from clover_jax.evaluation.page import report_text, speed_of
from clover_jax.evaluation.parts import METHOD, StageTimes
from clover_jax.evaluation.plan import Method, TimedPass, speed, split_rounds
from clover_jax.evaluation.plots import draw_plots
from clover_jax.runtime.files import write_json, write_text
from clover_jax.runtime.jsonl import plain_values
from clover_jax.runtime.provenance import versions

if TYPE_CHECKING:
    from clover_jax.evaluation.run import Evaluation

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


def build_report(manifest: dict, evaluation: Evaluation, measured: Measured) -> dict[str, Any]:
    """Return the report as JSON values; the revisions of the code are added to its manifest."""
    # Only passes of this plan count: the journal may have other batch sizes of earlier commands.
    plan, methods, journal = evaluation.plan, evaluation.methods, evaluation.journal
    tasks, passes, times = list(plan.tasks), journal.of(evaluation.keys), measured.times
    steps = {name: one.to_dict(times[VANILLA]) for name, one in times.items()}
    # The revisions of the code that timed the passes and of this, the oldest first.
    by_age = [one.revision for one in sorted(passes, key=lambda one: one.session)]
    revisions = dict.fromkeys([*by_age, journal.origin["revision"]])
    named = ", ".join(revision or "unknown" for revision in revisions) if any(revisions) else None
    report = {
        "format": FORMAT,
        "manifest": manifest | {"git_revision": named},
        "tasks": tasks,
        "sampling": plan.sampling.to_dict(),
        "is_equality_expected": all(map(plan.expects_equality, methods)),
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
        "sessions": sorted({one.session for one in passes}),
        "split_turns": split_rounds(passes),
        "step_timing": METHOD,
        "divergences": {
            name: [dataclasses.asdict(one) for one in by_row.values()]
            for name, by_row in measured.divergences.items()
        },
    }
    # From the figures themselves, so that the report cannot contradict them.
    report["problems"], report["slow_drafts"] = problems(report), slow_drafts(report)
    return plain_values(report)


def problems(report: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the run fails, a line each."""
    lines = []
    for name, cells in report["methods"].items():
        shown, cell = display_name(name), cells["overall"]
        if cell["failed"]:
            counts = f"{cell['failed']} of {cell['rows']} rows failed"
            lines.append(f"{shown}: {counts}, the first with: {cell['first_failure']}")
        later = sum(speeds[name]["overall"]["rows_failed"] for speeds in report["speed"].values())
        if later:
            lines.append(f"{shown}: rows failed in a later pass, {later} in all")

        equality = cell.get("equality", {"expected": False})
        if equality["expected"] and (count := equality["mismatches"]):
            lines.append(f"{name}: {count} rows differ from plain decoding by more than ties")
    return lines


def slow_drafts(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each draft that is slower than plain decoding: why, and what to do."""
    lines = []
    for name in report["manifest"]["drafts"]:
        cells = report["methods"][name]
        tau, step = cells["overall"]["tau"], cells["step"]
        speedup = speed_of(report, name, None)["speedup"]
        if speedup and step and tau and speedup["median"] < 1 and step["break_even_tau"] > tau:
            lines.append(
                f"{name}: {speedup['median']:.2f}x is slower than plain decoding, because one step "
                f"costs as much as {step['break_even_tau']:.2f} steps of plain decoding "
                f"(break-even tau) and emits {tau:.2f} tokens (tau): the base is too small for "
                "this machine; try a smaller tree, --tree=auto or a larger base"
            )
    return lines


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write report.json, and the page and the plots, which read nothing else."""
    write_json(directory / JSON, report)
    plots = draw_plots(report, directory / PLOTS)
    write_text(directory / MARKDOWN, report_text(report, plots))


def key_figures(report: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the last line of the command's output: overall figures at the first batch size."""
    drafts = {name: cells["overall"] for name, cells in report["methods"].items()}
    failed = max(one["failed"] for one in drafts.values())
    plain = drafts.pop(VANILLA)
    speedups = {name: speed_of(report, name, None)["speedup"] for name in drafts}

    return {
        "output": directory,
        "rows": plain["rows"],
        "failed": failed,
        "skipped": plain["skipped"],
        "truncated": plain["truncated"],
        "tau": {name: cell["tau"] for name, cell in drafts.items()},
        "speedup": {name: (speedup or {}).get("median") for name, speedup in speedups.items()},
        **{
            key: {name: cell["equality"][key] for name, cell in drafts.items()}
            for key in ("equal", "near_ties", "mismatches")
        },
        "problems": report["problems"],
    }


def _cell(method: Method, evaluation: Evaluation, measured: Measured, task: str | None) -> dict:
    cell = evaluation.files[method.name].tally(task).to_dict()
    if method.name == VANILLA:
        return cell

    plan, name = evaluation.plan, method.name
    numbers = [one.index for one in (plan.prompts if task is None else plan.tasks[task])]
    divergences = measured.divergences[name]
    cell["equality"] = summarize(
        [measured.comparisons[name][number] for number in numbers],
        [divergences[number] for number in numbers if number in divergences],
    ) | {"expected": plan.expects_equality(method)}
    hits = [one for number in numbers for one in measured.hits[name][number]]
    cell["accuracy"] = accuracy.total(hits).to_dict() if hits else None
    return cell


def _speeds(evaluation: Evaluation, size: int, passes: Sequence[TimedPass]) -> dict[str, Any]:
    """Return each method's speed at a batch size, over all tasks and on each."""

    def of(method: str, task: str | None) -> list[TimedPass]:
        at_size = (one for one in passes if one.batch_size == size)
        mine = (one for one in at_size if one.method == method)
        return [one for one in mine if task in (None, one.task)]

    def measured(method: str, task: str | None) -> dict[str, Any]:
        return speed(of(method, task), of(VANILLA, task))

    return {
        method.name: {
            "overall": measured(method.name, None),
            "tasks": {task: measured(method.name, task) for task in evaluation.plan.tasks},
        }
        for method in evaluation.methods
    }


def manifest(flags: dict[str, Any], methods: list[Method], prompts: dict[str, Any]) -> dict:
    """Return the manifest of a run.

    flags: every flag's value. prompts: their file, hash and count.
    """
    plain = methods[0].models
    identity = identity_of(plain)  # hashes, so that reports of other weights do not compare

    return {
        "command": "evaluate",
        "flags": flags,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(),
        # As loaded: the flag may say auto.
        "dtype": identity["dtype"],
        "base": {
            "source": plain.base.source,
            **{name: identity[f"base_{name}"] for name in ("hash", "params", "config")},
            "chat_template": identity["chat_template"],
        },
        "prompts": prompts,
        "drafts": {method.name: _draft(method) for method in methods[1:]},
    }


def conditions(mesh: str | None) -> dict[str, Any]:
    """Return what times depend on in addition to the models."""
    return {"hardware": hardware(), "versions": versions(), "mesh": mesh}


def hardware() -> dict[str, Any]:
    """Return the devices and the machine of the run."""
    device, processor = jax.devices()[0], platform.processor()
    # JAX calls every CPU "cpu"; Linux has the processor's name.
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if named := re.search("^model name.*?:(.*)", text, re.MULTILINE):
            processor = named[1].strip()
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "processor": processor,
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def _draft(method: Method) -> dict[str, Any]:
    draft, identity = method.models.draft, identity_of(method.models)
    assert draft is not None  # only the first method is plain decoding
    return {
        "source": draft.source,
        "kind": draft.head.config.kind,
        "hash": identity["draft_hash"],
        "tree": portable_name(method.models.tree),
        "tree_hash": identity["tree_hash"],
        "nodes": method.models.tree.num_nodes,
        # How it was trained: third-party heads do not have these.
        **{key: draft.provenance.get(key) for key in ("steps", "git_revision", "data_hash")},
    }
