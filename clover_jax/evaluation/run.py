"""One run of `evaluate`: prompts, methods, passes, figures, report."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.chat_templates import template_notice
from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import BadPrompt, Prompt, prompts_hash, read_prompts_and_mistakes
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Request
from clover_jax.errors import UserError
from clover_jax.evaluation import accuracy, stage_times
from clover_jax.evaluation.judging import classify, compare_passes
from clover_jax.evaluation.legs import LegJournal
from clover_jax.evaluation.manifest import conditions, manifest
from clover_jax.evaluation.methods import Method, load_methods, make_engines, sizes_on
from clover_jax.evaluation.options import Options
from clover_jax.evaluation.passes import Passes
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.report import Measured, build_report, key_figures, write_report
from clover_jax.evaluation.row_files import RowFile, open_rows
from clover_jax.evaluation.rows import turns_of
from clover_jax.evaluation.tasks import group_by_task
from clover_jax.generation.run import SHIPPED_PROMPTS, exact_matmuls
from clover_jax.generation.settings import GenerationSettings, sampling_for
from clover_jax.loading.models import Models
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note, progress_bar
from clover_jax.runtime.provenance import git_revision


def run(options: Options, settings: GenerationSettings, flags: dict[str, Any]) -> dict[str, Any]:
    """Measure what is asked for, write the report and return its key figures.

    flags: every flag's value, for the manifest.
    Raises UserError for what cannot be done; rows that fail are counted instead.
    """
    prompts = _read(options.prompts)  # before the models, which take longer
    directory = Path(options.output).expanduser()
    with exact_matmuls(str(resolve_dtype(options.spec.dtype))):
        with passing_note(f"loading {options.spec.base}"):
            methods = load_methods(options, settings)
        source = options.prompts
        if prompts is None:
            source = str(_shipped(methods[0].models))
            prompts = read_prompts_and_mistakes(source)
        plan = make_plan(options, settings, methods[0].models, prompts, source)
        _notice(plan, methods[0].models)
        # Before anything is written: a tree may not suit its head.
        engines = make_engines(methods, plan.sampling, plan.seed, plan.batch_sizes)
        with open_rows(directory, methods, plan, options.spec.base, options.overwrite) as files:
            journal = LegJournal(
                directory, conditions(options.spec.mesh), options.overwrite, git_revision()
            )
            _decode(methods, engines, plan, files, journal)
            measured = _measure(methods, engines[plan.batch_sizes[0]], plan, files, journal)
            about = {
                "source": source,
                "hash": prompts_hash(plan.prompts),
                "rows": len(plan.prompts),
                "limit_prompts": options.limit_prompts,
            }
            report = build_report(manifest(flags, methods, about), methods, plan, measured)
    write_report(directory, report)
    return key_figures(report, directory)


def _read(source: str | None) -> list[Prompt | BadPrompt] | None:
    return None if source is None else read_prompts_and_mistakes(Path(source).expanduser())


def _shipped(models: Models) -> Path:
    path = models.base.directory / SHIPPED_PROMPTS
    if not path.is_file():
        raise UserError(
            f"there is nothing to decode: {models.base.directory} has no {SHIPPED_PROMPTS}; "
            "give --prompts=FILE"
        )
    return path


def make_plan(
    options: Options,
    settings: GenerationSettings,
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
    source: str,
) -> Plan:
    """Return what is decoded; its batch sizes are those that engines of the models have."""
    tasks = group_by_task(prompts, source, options.limit_prompts)
    kept = [prompt for rows in tasks.values() for prompt in rows]
    return Plan(
        tasks=tasks,
        settings=settings,
        sampling=sampling_for(settings, kept),
        seed=options.seed,
        repeats=options.repeats,
        batch_sizes=sizes_on(models.mesh, options.all_batch_sizes),
        longest=max((_positions(prompt, models, settings) for prompt in kept), default=1),
    )


def _positions(prompt: Prompt | BadPrompt, models: Models, settings: GenerationSettings) -> int:
    """Return how many positions a row may need: all its turns and as long answers as allowed."""
    try:
        if isinstance(prompt, BadPrompt):
            raise UserError(prompt.error)
        answers = [""] * (prompt.num_turns - 1)
        ids = encode_prompt(prompt, models.tokenizer, models.base.config.vocab_size, answers)
        return len(ids) + prompt.num_turns * settings.for_row(prompt).max_new_tokens
    except UserError:
        return 1  # the row fails by itself when its turn comes


def _notice(plan: Plan, models: Models) -> None:
    prompts = [prompt for prompt in plan.prompts if isinstance(prompt, Prompt)]
    notice = template_notice(prompts, models.tokenizer)
    if notice:
        print(notice, file=sys.stderr, flush=True)


def _decode(
    methods: Sequence[Method],
    engines: Mapping[int, Mapping[str, Engine]],
    plan: Plan,
    files: Mapping[str, RowFile],
    journal: LegJournal,
) -> None:
    if journal.num_dropped:
        print(
            f"{journal.num_dropped} timed passes are of another machine or version, and are run "
            "again",
            file=sys.stderr,
            flush=True,
        )
    passes = Passes(methods, engines, plan, files, journal)
    sizes = {key: len(plan.tasks[key.task]) for key in plan.legs(methods)}
    done = sum(sizes.values()) - sum(sizes[key] for key in passes.todo)
    if any(file.rows for file in files.values()):
        rows = sum(len(file.rows) for file in files.values())
        print(
            f"{rows} rows and {done} of {sum(sizes.values())} timed rows are there already",
            file=sys.stderr,
            flush=True,
        )
    passes.run()


def _measure(
    methods: Sequence[Method],
    engines: Mapping[str, Engine],
    plan: Plan,
    files: Mapping[str, RowFile],
    journal: LegJournal,
) -> Measured:
    """Measure what needs no clock of its own: equality, accuracy, and the parts of a step."""
    vanilla, *drafts = methods
    requests = {prompt.index: prompt for prompt in plan.prompts}
    keys = list(plan.legs(methods))
    comparisons, divergences, hits = {}, {}, {}
    total = len(drafts) * len(plan.prompts)
    with (
        CompileClock() as compiling,
        progress_bar(total, "accuracy", "row", compiling=compiling) as bar,
    ):
        for method in drafts:
            plain, mine = files[vanilla.name].rows, files[method.name].rows
            legs = journal.of([key for key in keys if key.method == method.name])
            comparisons[method.name] = compare_passes(mine, legs, plain)
            bar.show(f"{method.name} beside plain decoding")
            divergences[method.name] = classify(
                comparisons[method.name], plain, plan, requests, vanilla
            )
            hits[method.name] = _accuracy(method, plain, bar)
    with passing_note("timing the parts of a step"):
        first = _first_requests(files[vanilla.name].rows, plan, requests)
        times = {
            method.name: stage_times.measure(method, engines[method.name], first)
            for method in (methods if first else ())
        }
    return Measured(files, journal, comparisons, divergences, hits, times)


def _accuracy(method: Method, plain: Mapping[int, Any], bar) -> dict[int, list[accuracy.Hits]]:
    """Return row -> the hits of its turns."""
    numbers, texts = [], []
    for number, row in plain.items():
        for turn in turns_of(row):
            numbers.append(number)
            texts.append(accuracy.Text(turn.prompt_ids, turn.output_ids))
    found: dict[int, list[accuracy.Hits]] = {number: [] for number in plain}
    seen: set[int] = set()
    bar.show(f"top-k accuracy of {method.name}")
    for index, hits in accuracy.measure(method, texts):
        found[numbers[index]].append(hits)
        if numbers[index] not in seen:
            seen.add(numbers[index])
            bar.update()
    bar.update(len(plain) - len(seen))
    return found


def _first_requests(
    plain: Mapping[int, Any], plan: Plan, prompts: Mapping[int, Prompt | BadPrompt]
) -> list[Request]:
    """Return requests for the first rows that have text, as many as the batch has slots."""
    rows = (row for row in plain.values() if any(turns_of(row)))
    return [
        plan.request(prompts[row["row"]], next(turns_of(row)).prompt_ids)
        for row in itertools.islice(rows, plan.batch_sizes[0])
    ]
