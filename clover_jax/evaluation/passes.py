"""Decode every task with every method, alternating, into row files and timed passes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from clover_jax.data.prompts import Failures
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.generate_run import memory_advice
from clover_jax.decoding.row_stream import RowStream
from clover_jax.evaluation.equality import compare_passes
from clover_jax.evaluation.options import VANILLA, display_name
from clover_jax.evaluation.plan import Method, PassJournal, PassKey, Plan, TimedPass, speed, warm_up
from clover_jax.evaluation.rows import RowFile, RowMaker, turns_of
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.jsonl import plain_values
from clover_jax.runtime.progress import Progress, passing_note, progress_bar, say


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
        # Keys come batch size by batch size, and there task by task.
        with CompileClock() as compiling:
            for batch_size, at_size in itertools.groupby(self.todo, lambda key: key.batch_size):
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
                another_text = file.add(row)
                if another_text is not None:
                    # Kept with the pass: it is judged as well as the row's first text.
                    changed.append(another_text)

                # A row that fails in every pass and with every method is reported once.
                line = self.failures.add(row) if is_new or another_text else None
                if line is not None:
                    bar.write(line)
                tau, rate = file.tally(key.task).tau, tokens / (compiling.now() - started)
                figures = "" if tau is None else f"tau {tau:.2f}, "
                place = f"{key.task} {display_name(key.method)} #{key.repeat + 1}"
                bar.show(f"{place}, {figures}{rate:.0f} tokens/s")
                bar.update()

        # Compilation after the warmup is not the method's time.
        self.journal.add(
            TimedPass(
                key,
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
