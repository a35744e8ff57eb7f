"""The report as a Markdown page of tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.evaluation.equality import MISMATCH
from clover_jax.evaluation.options import VANILLA, display_name

NONE = "-"
_NO_SPEED: Mapping[str, Any] = {"speedup": None, "tokens_per_second": None}
EQUAL = "rows equal to plain decoding"
_SHOWN_DIVERGENCES = 40  # on the page; report.json has all
DEFINITIONS = Path(__file__).with_name("definitions.md")  # of the figures


def report_text(report: Mapping[str, Any], plots: Sequence[Path]) -> str:
    """Return the page; `plots` are the pictures, in a folder next to it."""
    drafts = [name for name in report["methods"] if name != VANILLA]
    parts, tasks = ["# Evaluation", _summary(report)], report["tasks"]
    # A table by task would repeat the one over a single task.
    parts += ["## Overall" + (f" (task {tasks[0]})" if len(tasks) == 1 else ""), _overall(report)]
    parts += report["slow_drafts"]
    parts += [f"![{path.stem}]({path.parent.name}/{path.name})" for path in plots]
    if len(tasks) > 1:
        parts += ["## By task", *_by_task(report)]

    if drafts:
        parts += ["## By position", *(_positions(name, report) for name in drafts)]
        parts += ["## Accepted drafted tokens", *(_acceptance(name, report) for name in drafts)]
        parts += ["## Repeats and copies", *_repeats(report, drafts)]
        parts += ["## Equality with plain decoding", *_equality(report, drafts)]
    if len(report["batch_sizes"]) > 1:
        parts += ["## By batch size", _batch_sizes(report)]
    parts += ["## Time of a step", _steps(report)]

    parts += ["## Definitions", DEFINITIONS.read_text().rstrip()]
    parts += ["## Manifest", _manifest(report["manifest"])]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """Return a number with `digits` after the point; a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}{suffix}"


def spread(value: Mapping[str, Any] | None, digits: int = 2, suffix: str = "") -> str:
    """Return "median (least .. most)" of a figure that was measured several times."""
    if value is None:
        return NONE
    # One measurement has no spread.
    if len(value["repeats"]) < 2:
        return number(value["median"], digits, suffix)
    least, most = number(value["least"], digits), number(value["most"], digits)
    return f"{number(value['median'], digits, suffix)} ({least} .. {most})"


def cell_of(report: Mapping[str, Any], method: str, task: str | None) -> Mapping[str, Any]:
    """Return a method's figures on a task, or overall; empty where the report has no such task."""
    cells = report["methods"][method]
    return cells["overall"] if task is None else cells["tasks"].get(task, {})


def speed_of(report: Mapping[str, Any], method: str, task: str | None) -> Mapping[str, Any]:
    """Return a method's speed on a task, or overall, at the report's first batch size."""
    speeds = report["speed"][str(report["batch_sizes"][0])][method]
    return speeds["overall"] if task is None else speeds["tasks"].get(task, _NO_SPEED)


def groups(tasks: Sequence[str]) -> list[str | None]:
    """Return None for all tasks together, then each; a single task would be that again."""
    return [None, *tasks] if len(tasks) > 1 else [None]


def figures_of(report: Mapping[str, Any], method: str, task: str | None) -> dict[str, str]:
    """Return column -> text of a method's figures on one task or on all; a dash for none."""
    cell, speed = cell_of(report, method, task), speed_of(report, method, task)
    counts = cell.get("equality")
    return {
        "tau": number(cell.get("tau")),
        "extra tokens a step": number(cell.get("extra_tokens")),
        "tokens/s": spread(speed["tokens_per_second"], 0),
        "speed-up": spread(speed["speedup"], 2, "x"),
        EQUAL: f"{counts['equal']} of {counts['compared']}" if counts else NONE,
    }


def _summary(report: Mapping[str, Any]) -> str:
    plain, manifest = report["methods"][VANILLA]["overall"], report["manifest"]
    lines = [
        f"{plain['rows']} rows, {plain['turns']} answers, {plain['tokens']} tokens of plain "
        f"decoding; base {manifest['base']['source']}, {manifest['dtype']}; batch size "
        f"{report['batch_sizes'][0]}; {report['repeats']} repeats, the methods alternate; "
        f"{manifest['hardware']['device']} ({manifest['hardware']['processor']}).",
        f"Rows that failed: {plain['failed']}; skipped because they are longer than the context: "
        f"{plain['skipped']}; truncated on the left to fit it: {plain['truncated']}.",
        f"Answers that loop: {plain['repeats']['looping_turns']} of {plain['turns']}.",
    ]
    lines += [f"**Problem: {problem}.**" for problem in report["problems"]]

    # Speeds of different sessions compare less well.
    if len(report["sessions"]) > 1:
        lines.append(
            f"The command was stopped and resumed: times are of {len(report['sessions'])} "
            f"sessions, and in {len(report['split_turns'])} rounds the methods were not measured "
            "in the same session."
        )
    return "\n\n".join(lines)


def _overall(report: Mapping[str, Any]) -> str:
    rows, figures = [], {}
    for name in report["methods"]:
        draft = report["manifest"]["drafts"].get(name, {})
        tree = draft.get("tree", "none")
        # A tree's name may list all of its paths.
        tree = tree if len(tree) <= 32 else tree[:29] + "..."
        figures = figures_of(report, name, None)
        rows.append([display_name(name), f"{tree} ({draft.get('nodes', 0)})", *figures.values()])
    return table(["method", "tree (nodes)", *figures], rows)


def _by_task(report: Mapping[str, Any]) -> Iterable[str]:
    counted = ("rows", "failed", "skipped", "truncated")
    for name in report["methods"]:
        rows, figures = [], {}
        for task in report["tasks"]:
            counts = [cell_of(report, name, task)[key] for key in counted]
            figures = figures_of(report, name, task)
            rows.append([task, *counts, *figures.values()])
        yield f"### {display_name(name)}\n\n" + table(["task", *counted, *figures], rows)


def _positions(name: str, report: Mapping[str, Any]) -> str:
    cell = report["methods"][name]["overall"]
    accuracy = cell["accuracy"] or {}
    columns = {
        "joint hit rate": cell["hit_rate"],
        "conditional hit rate": cell["conditional_hit_rate"],
        **{f"top-{k} accuracy": accuracy.get(f"top_{k}", []) for k in (1, 3, 5)},
    }
    # A baseline has no accuracy, and a deep tree may never be accepted to its end.
    columns = {column: _to_last(values) for column, values in columns.items() if values}
    # The head may go deeper than the tree, so columns differ in length.
    count = max(map(len, columns.values()), default=0)
    rows = [
        [i, *(number(values[i], 3) if i < len(values) else NONE for values in columns.values())]
        for i in range(count)
    ]
    return f"### {name}\n\n" + table(["position", *columns], rows)


def _to_last(values: Sequence[float]) -> Sequence[float]:
    """Return values up to the last that is not 0, and the first in any case."""
    end = max((i for i, value in enumerate(values) if value), default=0)
    return values[: end + 1]


def _acceptance(name: str, report: Mapping[str, Any]) -> str:
    cell = report["methods"][name]["overall"]
    forwards = max(cell["target_forwards"], 1)
    lengths = table(
        ["accepted", "forwards", "share"],
        [
            [k, count, number(100 * count / forwards, 1, " %")]
            for k, count in enumerate(_to_last(cell["accepted_histogram"]))
        ],
    )
    contexts = table(
        ["tokens before the step", "forwards", "mean accepted"],
        [
            [f"{one['from']} .. {one['to'] - 1}", one["forwards"], number(one["mean_accepted"])]
            for one in cell["by_context"]
        ],
    )

    # Under vLLM's names, to compare with its metrics.
    counters = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counts = [f"`{key}` {cell[key]}" for key in (*counters, "num_accepted_tokens_per_pos")]
    return "\n\n".join([f"### {name}", lengths, contexts, ", ".join(counts)])


def _repeats(report: Mapping[str, Any], drafts: Sequence[str]) -> Iterable[str]:
    """Yield the tables of how much the text repeats, and of how much was copied from it."""
    # Repeats are counted in plain decoding's text, which is the same for all drafts.
    rows = []
    for task in groups(report["tasks"]):
        plain = cell_of(report, VANILLA, task)
        repeats = plain["repeats"]
        repeated = _share(repeats["repeated"], repeats["ngrams"])
        row = [task or "overall", repeated, f"{repeats['looping_turns']} of {plain['turns']}"]
        for name in drafts:
            of_draft = cell_of(report, name, task)["repeats"]
            row += [number(of_draft["tau_looping"]), number(of_draft["tau_not_looping"])]
        rows.append(row)
    header = [f"{name}: tau where answers {loop}" for name in drafts for loop in ("loop", "do not")]
    yield table(["task", "repeated 8-grams", "answers that loop", *header], rows)

    rows = []
    for name in drafts:
        for task in groups(report["tasks"]):
            cell = cell_of(report, name, task)
            accepted, copied = cell["num_accepted_tokens"], cell["copied_tokens"]
            if copied is not None:  # a tree without copies has no count
                figures = (accepted, accepted - copied, copied, _share(copied, accepted))
                rows.append([name, task or "overall", *figures])
    if rows:
        yield table(["draft", "task", "accepted", "drafted", "copied", "share copied"], rows)


def _share(part: int, whole: int) -> str:
    """Return "p %" of a whole; a dash where there is nothing."""
    return number(100 * part / whole if whole else None, 1, " %")


def _equality(report: Mapping[str, Any], drafts: Sequence[str]) -> Iterable[str]:
    keys = ("compared", "equal", "near_ties", "mismatches", "not_compared")
    counts = {name: report["methods"][name]["overall"]["equality"] for name in drafts}
    yield table(
        ["draft", *(key.replace("_", " ") for key in keys)],
        [[name, *(counts[name][key] for key in keys)] for name in drafts],
    )
    free = [name for name in drafts if not counts[name]["expected"]]
    if free:
        yield (
            f"{', '.join(free)}: children were drawn from the draft, or verification was typical, "
            "so these drafts need not emit plain decoding's tokens. Rows that differ are not "
            "judged, and all count as mismatches."
        )

    # Plain decoding too: in low precision its own text may depend on the batch.
    changed = {
        name: sum(speeds[name]["overall"]["rows_changed"] for speeds in report["speed"].values())
        for name in report["methods"]
    }
    if any(changed.values()):
        listed = ", ".join(
            f"{display_name(name)} {count}" for name, count in changed.items() if count
        )
        yield f"Texts of later passes that differ from the first pass: {listed}."

    differing = [(name, one) for name in drafts for one in report["divergences"][name]]
    # Mismatches first: they end the command with status 1.
    differing.sort(key=lambda pair: pair[1]["kind"] != MISMATCH)
    if not differing:
        return

    columns = ("index", "turn", "batch_size", "repeat", "position", "expected", "found")
    rows = [
        [
            name,
            *(NONE if one[key] is None else one[key] for key in columns),
            # Gaps of near-ties are tiny, so they have two significant digits.
            *(NONE if one[key] is None else f"{one[key]:.2g}" for key in ("gap", "threshold")),
            one["kind"],
        ]
        for name, one in differing[:_SHOWN_DIVERGENCES]
    ]
    header = [key.replace("_", " ") for key in columns]
    yield table(["draft", *header, "gap", "threshold", "kind"], rows)
    yield "Batch size and repeat are given for a text of a later pass only."
    left = len(differing) - _SHOWN_DIVERGENCES
    if left > 0:
        yield f"report.json lists {left} more under `divergences`."


def _batch_sizes(report: Mapping[str, Any]) -> str:
    names = list(report["methods"])
    rows = []
    for size in sorted(report["batch_sizes"]):
        cells = [report["speed"][str(size)][name]["overall"] for name in names]
        rates = (spread(cell["tokens_per_second"], 0) for cell in cells)
        # Plain decoding comes first and has no speed-up over itself.
        speedups = (spread(cell["speedup"], 2, "x") for cell in cells[1:])
        rows.append([size, *rates, *speedups])
    header = [f"{display_name(name)} tokens/s" for name in names]
    header += [f"{name} speed-up" for name in names[1:]]
    return table(["batch size", *header], rows)


def _steps(report: Mapping[str, Any]) -> str:
    rows = []
    for name, cells in report["methods"].items():
        # `step` is None where no row had text to time steps with.
        step = cells["step"]
        if step:
            parts = ("draft", "verify", "rest")
            shares = [number(100 * step[f"{part}_share"], 0, " %") for part in parts]
            cost = number(step["break_even_tau"], 2)
            rows.append([display_name(name), number(1000 * step["step"], 3), *shares, cost])
    header = ["method", "step, ms", "draft (absorb included)", "verify", "accept, commit, rest"]
    return f"Measured: {report['step_timing']}.\n\n" + table([*header, "break-even tau"], rows)


def _manifest(manifest: Mapping[str, Any]) -> str:
    def joined(part: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in part.items())

    drafts = []
    for name, draft in manifest["drafts"].items():
        origin = f"{draft['source']}, step {draft['steps']}, {draft['hash']}"
        # Lookup and recycle have no weights.
        if draft["steps"] is None and draft["source"] == draft["kind"]:
            origin = "from the text"
        drafts.append([f"draft {name}", f"{draft['kind']}, {origin}"])

    # None stands for a flag that was left out.
    flags = manifest["flags"].items()
    rows = [
        ["finished at", manifest["finished_at"]],
        ["git revision", manifest["git_revision"]],
        ["versions", joined(manifest["versions"])],
        ["hardware", joined(manifest["hardware"])],
        ["base", f"{manifest['base']['source']}, {manifest['base']['hash']}"],
        ["prompts", f"{manifest['prompts']['source']}, {manifest['prompts']['hash']}"],
        *drafts,
        ["flags", " ".join(f"--{name}={value}" for name, value in flags if value is not None)],
    ]
    return table(["entry", "value"], rows)
