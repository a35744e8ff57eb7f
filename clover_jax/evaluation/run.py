"""One run of `evaluate`: prompts, methods, passes, figures, report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clover_jax.data.chat import encode_prompt
from clover_jax.data.chat_templates import frozen_clock, template_notice
from clover_jax.data.prompts import (
    BadPrompt,
    Failures,
    Prompt,
    prompts_hash,
    read_prompt_files,
    read_prompts_and_mistakes,
    shipped_prompts,
)
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.generate_run import memory_advice
from clover_jax.decoding.models import Models
from clover_jax.decoding.race import check_one_process
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.row_stream import RowStream
from clover_jax.decoding.spec import AUTO_TREE
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation import accuracy, parts
from clover_jax.evaluation.equality import compare_passes, judge
from clover_jax.evaluation.options import VANILLA, Options, display_name
from clover_jax.evaluation.plan import (
    Method,
    PassJournal,
    PassKey,
    Plan,
    TimedPass,
    group_by_task,
    load_methods,
    make_engines,
    sizes_on,
    speed,
    warm_up,
)
from clover_jax.evaluation.report import (
    Measured,
    build_report,
    conditions,
    key_figures,
    manifest,
    write_report,
)
from clover_jax.evaluation.rows import RowFile, RowMaker, open_row_files, turns_of
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.jsonl import plain_values
from clover_jax.runtime.progress import Progress, passing_note, progress_bar, say
from clover_jax.runtime.provenance import git_revision


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A run of `evaluate`: its plan and methods, and its rows and times.

    methods: plain decoding first. engines: batch size -> method's name -> engine.
    files: method's name -> its rows. journal: of timed passes. failures: rows that failed.
    """

    methods: Sequence[Method]
    engines: Mapping[int, Mapping[str, Engine]]
    plan: Plan
    files: Mapping[str, RowFile]
    journal: PassJournal
    failures: Failures = dataclasses.field(default_factory=Failures)

    @property
    def keys(self) -> list[PassKey]:
        return list(self.plan.passes(method.name for method in self.methods))

    @property
    def todo(self) -> list[PassKey]:
        return [
            key
            for key in self.keys
            # A pass also runs again where rows are missing: a row file drops a torn last line.
            if key not in self.journal
            or {one.index for one in self.plan.tasks[key.task]} - self.files[key.method].rows.keys()
        ]

    def num_rows(self, keys: Iterable[PassKey]) -> int:
        return sum(len(self.plan.tasks[key.task]) for key in keys)

    def run_passes(self) -> None:
        """Run the passes left: a bar for each batch size, a line for every finished task."""
        # What earlier sessions have left.
        if dropped := self.journal.num_dropped:
            say(f"{dropped} timed passes are of another machine or version, and are run again")
        todo = self.todo
        if rows := sum(len(file.rows) for file in self.files.values()):
            total = self.num_rows(self.keys)
            done = total - self.num_rows(todo)
            say(f"{rows} rows and {done} of {total} timed rows are there already")

        # Keys come batch size by batch size, and there task by task.
        with CompileClock() as compiling:
            for batch_size, at_size in itertools.groupby(todo, lambda key: key.batch_size):
                keys = list(at_size)
                # All programs compile before the bar starts to estimate the time left.
                for method in self.methods:
                    name = display_name(method.name)
                    note = f"compiling for {name}, batch size {batch_size}"
                    with passing_note(note), memory_advice(batch_size):
                        warm_up(method, self.engines[batch_size][method.name], self.plan.longest)

                # Finished rows count too, or the bar of a resumed run would start at 0.
                total = self.num_rows(key for key in self.keys if key.batch_size == batch_size)
                done = total - self.num_rows(keys)
                desc = f"batch size {batch_size}"
                with progress_bar(total, desc, "row", initial=done) as bar:
                    for task, of_task in itertools.groupby(keys, lambda key: key.task):
                        for key in of_task:
                            self._run_pass(key, compiling, bar)
                        bar.write(self._task_line(batch_size, task))
        for line in self.failures.counts():
            say(line)

    def _run_pass(self, key: PassKey, compiling: CompileClock, bar: Progress) -> None:
        """Decode a task once; keep its rows in the method's file and its time in the journal."""
        prompts, file = self.plan.tasks[key.task], self.files[key.method]
        (models,) = (method.models for method in self.methods if method.name == key.method)
        engine = self.engines[key.batch_size][key.method]
        stream = RowStream(engine, models, prompts, self.plan.settings)
        maker, tokens, changed = RowMaker(), 0, []
        # The clock stops while programs compile.
        started, compiled_before = compiling.now(), compiling.seconds

        with memory_advice(key.batch_size):
            for event in stream:
                row = maker.take(event)
                if row is None:
                    continue
                tokens += sum(len(turn.output_ids) for turn in turns_of(row))
                is_new = row["index"] not in file.rows
                # Another text is kept with the pass: it is judged as well as the row's first text.
                if another_text := file.add(row):
                    changed.append(another_text)
                # A row that fails in every pass and with every method is reported once.
                if (is_new or another_text) and (line := self.failures.add(row)) is not None:
                    bar.write(line)
                tau, rate = file.tally(key.task).tau, tokens / (compiling.now() - started)
                figures = "" if tau is None else f"tau {tau:.2f}, "
                place = f"{key.task} {display_name(key.method)} #{key.repeat + 1}"
                bar.show(f"{place}, {figures}{rate:.0f} tokens/s")
                bar.update()

        # Compilation after the warmup is not the method's time.
        self.journal.add(
            TimedPass(
                *key,
                rows=len(prompts),
                tokens=tokens,
                seconds=compiling.now() - started,
                compile_seconds=compiling.seconds - compiled_before,
                changed=plain_values(changed),
                **self.journal.origin,
            )
        )

    def _task_line(self, batch_size: int, task: str) -> str:
        """Return the figures of a task that every method has finished."""
        plain = self.journal.select(batch_size=batch_size, task=task, method=VANILLA)
        parts = []
        for name, file in self.files.items():
            passes = self.journal.select(batch_size=batch_size, task=task, method=name)
            measured, tally = speed(passes, plain), file.tally(task)
            rate, ratio = measured["tokens_per_second"], measured["speedup"]
            text = display_name(name)
            text += f" {rate['median']:.0f} tokens/s" if rate else ""
            if name != VANILLA and tally.tau is not None:
                text += f", tau {tally.tau:.2f}, "
                text += f"{ratio['median']:.2f}x, " if ratio else ""
                # Rows that have plain decoding's text in every pass so far.
                rows = {one.index: file.rows[one.index] for one in self.plan.tasks[task]}
                later = self.journal.select(task=task, method=name)
                compared = compare_passes(rows, later, self.files[VANILLA].rows)
                equal = sum(bool(texts) and not any(texts) for texts in compared.values())
                text += f"{equal} of {tally.rows} rows equal"
            parts.append(text)
        return f"{task} (batch size {batch_size}): {'; '.join(parts)}"


def evaluate(options: Options, settings: GenerationSettings, flags: dict) -> dict[str, Any]:
    """Measure the methods, write the report and return its key figures.

    flags: every flag's value, for the manifest.
    Several processes decode and measure together; the primary reads and writes the files.
    Raises UserError for a mistake of the user; rows that fail are counted instead.
    """
    # The rows of a run that was stopped were made at another time.
    rows = () if options.overwrite else (options.directory / "rows").glob("*.manifest.json")
    with frozen_clock(*sorted(rows)):
        return _evaluate(options, settings, flags)


def _evaluate(
    options: Options, settings: GenerationSettings, flags: dict[str, Any]
) -> dict[str, Any]:
    # Mistakes are found before the models are loaded, which takes longer.
    if any(choice.tree == AUTO_TREE for choice in options.draft_choices):
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
            given = options.directory, conditions(options.spec.mesh), options.overwrite
            journal = from_primary(lambda: PassJournal(*given, git_revision()))
            evaluation = Evaluation(methods, engines, plan, files, journal)
            evaluation.run_passes()
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
    if sampling.biased or sampling.penalized or sampling.masked:
        raise UserError(
            "evaluate does not support min_new_tokens, logit_bias, penalties, min_p and "
            "structured_outputs"
        )
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


def _measure(evaluation: Evaluation) -> Measured:
    """Measure after decoding: equality, accuracy, and the parts of a step."""
    plan, files, (vanilla, *drafts) = evaluation.plan, evaluation.files, evaluation.methods
    plain = files[vanilla.name].rows
    comparisons, divergences, hits = {}, {}, {}
    total = len(drafts) * len(plan.prompts)
    with progress_bar(total, "accuracy", "row", first_compiles=True) as bar:
        for method in drafts:
            name, is_expected = method.name, plan.expects_equality(method)
            bar.show(f"{name} against plain decoding")
            # All texts of a row: the first, and different ones of later passes.
            passes = evaluation.journal.of([key for key in evaluation.keys if key.method == name])
            comparisons[name] = compare_passes(files[name].rows, passes, plain)
            divergences[name] = judge(comparisons[name], plain, plan, vanilla, is_expected)
            hits[name] = _accuracy(method, plain, bar)

    # The first rows that have text, as many as the batch has slots.
    rows = (row for row in plain.values() if any(turns_of(row)))
    first = [
        plan.request(row["row"], next(turns_of(row)).prompt_ids)
        for row in itertools.islice(rows, plan.batch_sizes[0])
    ]
    engines, timed = evaluation.engines[plan.batch_sizes[0]], evaluation.methods if first else ()
    times = {}
    with progress_bar(len(timed), "parts of a step", "method", first_compiles=True) as bar:
        for method in timed:
            bar.show(method.name)
            times[method.name] = parts.measure(method, engines[method.name], first)
            bar.update()
    return Measured(comparisons, divergences, hits, times)


def _accuracy(method: Method, plain: Mapping, bar: Progress) -> dict[int, list[accuracy.Hits]]:
    bar.show(f"top-k accuracy of {method.name}")
    hits: dict[int, list[accuracy.Hits]] = {number: [] for number in plain}
    # A baseline has no probabilities to rank.
    head = method.models.head
    if head is not None and head.config.kind not in TRAINING_FREE:
        # Turns are batched by their length, so each has the number of its row.
        numbered = [(number, turn) for number, row in plain.items() for turn in turns_of(row)]
        for index, hits_of_turn in accuracy.measure(method, [turn for _, turn in numbered]):
            of_row = hits[numbered[index][0]]
            of_row.append(hits_of_turn)
            # A row of several turns counts with its first one.
            bar.update(int(len(of_row) == 1))
    bar.update(sum(not turns for turns in hits.values()))  # rows without figures
    return hits
