"""One run of `evaluate`: prompts, methods, passes, figures, report."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from clover_jax.data.chat_templates import template_notice
from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import (
    BadPrompt,
    Prompt,
    prompts_hash,
    read_prompt_files,
    read_prompts_and_mistakes,
    shipped_prompts,
)
from clover_jax.decoding.models import Models
from clover_jax.decoding.race import check_one_process
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.tree_config import AUTO
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation import accuracy, parts
from clover_jax.evaluation.equality import compare_passes, judge
from clover_jax.evaluation.options import Options
from clover_jax.evaluation.passes import Evaluation
from clover_jax.evaluation.plan import (
    Method,
    PassJournal,
    Plan,
    group_by_task,
    load_methods,
    make_engines,
    sizes_on,
)
from clover_jax.evaluation.report import (
    Measured,
    build_report,
    conditions,
    key_figures,
    manifest,
    write_report,
)
from clover_jax.evaluation.rows import open_row_files, turns_of
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.progress import Progress, passing_note, progress_bar, say
from clover_jax.runtime.provenance import git_revision


def evaluate(
    options: Options, settings: GenerationSettings, flags: dict[str, Any]
) -> dict[str, Any]:
    """Measure the methods, write the report and return its key figures.

    flags: every flag's value, for the manifest.
    Several processes decode and measure together; the primary reads and writes the files.
    Raises UserError for a mistake of the user; rows that fail are counted instead.
    """
    # Mistakes are found before the models are loaded, which takes longer.
    if any(choice.tree == AUTO for choice in options.draft_choices):
        check_one_process()
    prompts, source = None, options.prompts
    if source is not None:
        prompts = from_primary(functools.partial(read_prompt_files, source))
    with exact_matmuls(str(resolve_dtype(options.spec.dtype))):
        with passing_note(f"loading {options.spec.base}"):
            methods = load_methods(options, settings, prompts)
        plain = methods[0].models
        if prompts is None:
            shipped = shipped_prompts(plain.base.directory, "--prompts=FILE")
            prompts = from_primary(lambda: read_prompts_and_mistakes(shipped))
            source = str(shipped)

        plan = make_plan(options, settings, plain, prompts)
        say(template_notice(plan.prompts, plain.tokenizer))
        # Before anything is written: a tree may not suit its head.
        engines = make_engines(methods, plan)

        with open_row_files(options, methods, plan) as files:
            # Read by one process: processes with other finished passes would run different ones.
            here = conditions(options.spec.mesh)
            journal = from_primary(
                lambda: PassJournal(options.directory, here, options.overwrite, git_revision())
            )
            evaluation = Evaluation(methods, engines, plan, files, journal)
            _decode(evaluation)
            measured = _measure(evaluation)
            about = {
                "source": source,
                "hash": prompts_hash(plan.prompts),
                "rows": len(plan.prompts),
                "limit_prompts": options.limit_prompts,
            }
            about_run = manifest(flags, methods, about)  # all processes hash the params together

        def report() -> dict[str, Any]:
            values = build_report(about_run, evaluation, measured)
            write_report(options.directory, values)
            for line in values["slow_drafts"]:
                say(line)
            return key_figures(values, options.directory)

        return from_primary(report)


def make_plan(
    options: Options,
    settings: GenerationSettings,
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
) -> Plan:
    """Return the plan of a run; its batch sizes are rounded up to the mesh."""
    # Only rows within the limit count for the settings and the longest buffer.
    tasks = group_by_task(prompts, options.limit_prompts)
    kept = [prompt for rows in tasks.values() for prompt in rows]
    sampling = sampling_for(settings, kept)
    # Differences are judged with the base's own logits.
    if sampling.biased:
        raise UserError("evaluate does not support rows with min_new_tokens or logit_bias")
    return Plan(
        tasks=tasks,
        settings=settings,
        sampling=sampling,
        seed=options.seed,
        repeats=options.repeats,
        batch_sizes=sizes_on(models.mesh, options.all_batch_sizes),
        longest=max((_positions(prompt, models, settings) for prompt in kept), default=1),
    )


def _positions(prompt: Prompt | BadPrompt, models: Models, settings: GenerationSettings) -> int:
    """Return how many positions a row may need: all its turns and the longest answers allowed."""
    if isinstance(prompt, BadPrompt):
        return 1
    try:
        answers = [""] * (prompt.num_turns - 1)
        ids = encode_prompt(prompt, models.tokenizer, models.base.config.vocab_size, answers)
        return len(ids) + prompt.num_turns * settings.for_row(prompt).max_new_tokens
    except UserError:
        return 1  # the row fails when its turn comes


def _decode(evaluation: Evaluation) -> None:
    """Run the passes that are not done, and say first what earlier sessions have left."""
    if evaluation.journal.num_dropped:
        say(
            f"{evaluation.journal.num_dropped} timed passes are of another machine or version, "
            "and are run again"
        )
    # Rows that a stopped command has left.
    rows = sum(len(file.rows) for file in evaluation.files.values())
    if rows:
        total = evaluation.num_rows(evaluation.keys)
        done = total - evaluation.num_rows(evaluation.todo)
        say(f"{rows} rows and {done} of {total} timed rows are there already")
    evaluation.run_passes()


def _measure(evaluation: Evaluation) -> Measured:
    """Measure after decoding: equality, accuracy, and the parts of a step."""
    plan, files, (vanilla, *drafts) = evaluation.plan, evaluation.files, evaluation.methods
    plain = files[vanilla.name].rows
    comparisons, divergences, hits = {}, {}, {}
    total = len(drafts) * len(plan.prompts)
    with progress_bar(total, "accuracy", "row", first_compiles=True) as bar:
        for method in drafts:
            name = method.name
            # All texts of a row: the first, and different ones of later passes.
            keys = [key for key in evaluation.keys if key.method == name]
            passes = evaluation.journal.of(keys)
            comparisons[name] = compare_passes(files[name].rows, passes, plain)
            bar.show(f"{name} against plain decoding")
            divergences[name] = judge(comparisons[name], plain, plan, vanilla)
            hits[name] = _accuracy(method, plain, bar)

    # After the bar: nothing else may run while these programs are timed.
    with passing_note("timing the parts of a step"):
        # The first rows that have text, as many as the batch has slots.
        rows = (row for row in plain.values() if any(turns_of(row)))
        first = [
            plan.request(row["row"], next(turns_of(row)).prompt_ids)
            for row in itertools.islice(rows, plan.batch_sizes[0])
        ]
        engines = evaluation.engines[plan.batch_sizes[0]]
        times = {
            method.name: parts.measure(method, engines[method.name], first)
            for method in (evaluation.methods if first else ())
        }
    return Measured(comparisons, divergences, hits, times)


def _accuracy(
    method: Method, plain: Mapping[int, Any], bar: Progress
) -> dict[int, list[accuracy.Hits]]:
    # Turns are batched by their length, so each has the number of its row.
    numbered = [(number, turn) for number, row in plain.items() for turn in turns_of(row)]
    bar.show(f"top-k accuracy of {method.name}")
    hits: dict[int, list[accuracy.Hits]] = {number: [] for number in plain}
    # A baseline has no probabilities to rank.
    head = method.models.head
    if head is None or head.config.kind in TRAINING_FREE:
        bar.update(len(plain))
        return hits
    for index, hits_of_turn in accuracy.measure(method, [turn for _, turn in numbered]):
        of_row = hits[numbered[index][0]]
        of_row.append(hits_of_turn)
        # A row of several turns counts with its first one.
        bar.update(int(len(of_row) == 1))
    bar.update(sum(not turns for turns in hits.values()))  # rows without text
    return hits
