"""Decoding every task with every method, in turns, into row files and timed legs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from clover_jax.decoding.engine import Engine
from clover_jax.evaluation.judging import compare_passes
from clover_jax.evaluation.legs import Leg, LegJournal, LegKey, speed
from clover_jax.evaluation.methods import Method, warm_up
from clover_jax.evaluation.options import VANILLA, display_name
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.row_files import RowFile
from clover_jax.evaluation.rows import RowMaker, turns_of
from clover_jax.generation.row_stream import RowStream
from clover_jax.generation.run import memory_advice
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import Progress, passing_note, progress_bar
from clover_jax.storage.jsonl import plain_values


class Passes:
    """Runs the legs that are not done yet."""

    def __init__(
        self,
        methods: Sequence[Method],
        engines: Mapping[int, Mapping[str, Engine]],
        plan: Plan,
        files: Mapping[str, RowFile],
        journal: LegJournal,
    ):
        """Take what is open; nothing runs yet."""
        self._methods = {method.name: method for method in methods}
        self._engines = engines
        self._plan, self._files, self._journal = plan, files, journal

    @property
    def todo(self) -> list[LegKey]:
        """The legs to run, in order."""
        return [
            key
            for key in self._plan.legs(list(self._methods.values()))
            if key not in self._journal or not self._files[key.method].has_all(key.task)
        ]

    def run(self) -> None:
        """Run them all, under a bar for each batch size; a line for every finished task."""
        todo = self.todo
        with CompileClock() as compiling:
            for batch_size in self._plan.batch_sizes:
                keys = [key for key in todo if key.batch_size == batch_size]
                if keys:
                    self._warm_up(batch_size)
                    with self._bar(batch_size, keys, compiling) as bar:
                        self._run_legs(keys, compiling, bar)

    def _warm_up(self, batch_size: int) -> None:
        """Compile all programs, before the bar begins to reckon how long the rest takes."""
        for name, method in self._methods.items():
            note = f"compiling for {display_name(name)}, batch size {batch_size}"
            with passing_note(note), memory_advice(batch_size):
                warm_up(method, self._engines[batch_size][name], self._plan.longest)

    def _bar(self, batch_size: int, keys: Sequence[LegKey], compiling: CompileClock) -> Progress:
        def rows(keys: Iterable[LegKey]) -> int:
            return sum(len(self._plan.tasks[key.task]) for key in keys)

        every = self._plan.legs(list(self._methods.values()))
        total = rows(key for key in every if key.batch_size == batch_size)
        return progress_bar(
            total,
            f"batch size {batch_size}",
            "row",
            initial=total - rows(keys),
            compiling=compiling,
        )

    def _run_legs(
        self,
        keys: Sequence[LegKey],
        compiling: CompileClock,
        bar: Progress,
    ) -> None:
        for number, key in enumerate(keys):
            self._run_leg(key, compiling, bar)
            if number + 1 == len(keys) or keys[number + 1].task != key.task:
                bar.write(self._task_line(key.batch_size, key.task))

    def _run_leg(
        self,
        key: LegKey,
        compiling: CompileClock,
        bar: Progress,
    ) -> None:
        name = key.method
        prompts, file = self._plan.tasks[key.task], self._files[name]
        engine = self._engines[key.batch_size][name]
        stream = RowStream(engine, self._methods[name].models, prompts, self._plan.settings)
        maker, tokens, changed = RowMaker(), 0, []
        started, compiled_before = time.perf_counter(), compiling.seconds
        with memory_advice(key.batch_size):
            for event in stream:
                row = maker.take(event)
                if row is None:
                    continue
                tokens += sum(len(turn.output_ids) for turn in turns_of(row))
                is_new = row["index"] not in file.rows
                again = file.add(row)
                if again is not None:
                    changed.append(again)
                reason = row.get("error") or row.get("skipped")
                if reason and (is_new or again):
                    what = "failed" if "error" in row else "skipped"
                    bar.write(f"{display_name(name)}: row {row['index']} {what}: {reason}")
                compiled = compiling.seconds - compiled_before
                speed_now = tokens / (time.perf_counter() - started - compiled)
                bar.show(self._figures(key, speed_now))
                bar.update()
        compiled = compiling.seconds - compiled_before
        seconds = time.perf_counter() - started - compiled
        self._journal.add(
            Leg(
                *key,
                rows=len(prompts),
                tokens=tokens,
                seconds=seconds,
                compile_seconds=compiled,
                changed=plain_values(changed),
                session=self._journal.session,
                conditions=self._journal.conditions,
                revision=self._journal.revision,
            )
        )

    def _figures(self, key: LegKey, tokens_per_second: float) -> str:
        tau = self._files[key.method].tally(key.task).tau
        shown = "" if tau is None else f"tau {tau:.2f}, "
        return f"{key.task} {display_name(key.method)} #{key.repeat + 1}, {shown}{tokens_per_second:.0f} tokens/s"

    def _task_line(self, batch_size: int, task: str) -> str:
        """Return what is known of a task that every method has finished."""
        plain = self._journal.select(batch_size=batch_size, task=task, method=VANILLA)
        parts = []
        for name, file in self._files.items():
            legs = self._journal.select(batch_size=batch_size, task=task, method=name)
            measured = speed(legs, plain)
            rate = measured["tokens_per_second"]
            text = display_name(name)
            text += f" {rate['median']:.0f} tokens/s" if rate else ""
            tally = file.tally(task)
            if name != VANILLA and tally.tau is not None:
                ratio = measured["speedup"]
                text += f", tau {tally.tau:.2f}, "
                text += f"{ratio['median']:.2f}x, " if ratio else ""
                text += f"{self._num_equal(name, task)} of {tally.rows} rows equal"
            parts.append(text)
        return f"{task} (batch size {batch_size}): {'; '.join(parts)}"

    def _num_equal(self, name: str, task: str) -> int:
        plain, mine = self._files[VANILLA].rows, self._files[name].rows
        rows = {prompt.index: mine[prompt.index] for prompt in self._plan.tasks[task]}
        found = compare_passes(rows, self._journal.select(task=task, method=name), plain)
        return sum(
            texts[0].is_compared and not any(text.divergence for text in texts)
            for texts in found.values()
        )
