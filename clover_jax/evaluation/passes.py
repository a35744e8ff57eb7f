"""Decoding every task with every method, in turns, into row files and timed legs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.compile_clock import CompileClock
from clover_jax.data.prompts import BadPrompt, Prompt, prompts_hash
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.sampling import SamplingConfig
from clover_jax.evaluation.equality import compare_rows
from clover_jax.evaluation.legs import Leg, LegJournal, LegKey, speed
from clover_jax.evaluation.methods import Method, warm_up
from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.rows import RowMaker, turns_of
from clover_jax.evaluation.tally import Tally
from clover_jax.evaluation.tasks import Tasks
from clover_jax.generation.row_stream import RowStream
from clover_jax.generation.run import memory_advice
from clover_jax.generation.settings import GenerationSettings
from clover_jax.jsonl import read_rows
from clover_jax.progress import Progress, passing_note, progress_bar
from clover_jax.row_writer import RowWriter

ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is decoded: all tasks, `repeats` times at every batch size.

    longest: positions that the longest row may need.
    """

    tasks: Tasks
    settings: GenerationSettings
    sampling: SamplingConfig
    seed: int
    repeats: int
    batch_sizes: Sequence[int]
    longest: int

    @property
    def prompts(self) -> list[Prompt | BadPrompt]:
        """All rows, task by task."""
        return [prompt for rows in self.tasks.values() for prompt in rows]

    def legs(self, methods: Sequence[Method]) -> Iterator[LegKey]:
        """Yield the keys of all legs in the order in which they run.

        Who begins changes from turn to turn.
        """
        turn = 0
        names = [method.name for method in methods]
        for batch_size in self.batch_sizes:
            for task in self.tasks:
                for repeat in range(self.repeats):
                    first = turn % len(names)
                    for name in names[first:] + names[:first]:
                        yield LegKey(batch_size, task, repeat, name)
                    turn += 1


class RowFile:
    """One method's rows: kept on disk as they first came, and in memory.

    A row's "index" is its place when tasks follow one another; "row" is its place in the input.
    """

    def __init__(self, writer: RowWriter, plan: Plan, method: Method):
        """Take the open writer, and read what an earlier session has left."""
        self._writer, self._method, self._plan = writer, method, plan
        self._place = {prompt.index: place for place, prompt in enumerate(plan.prompts)}
        self._task = {prompt.index: task for task, rows in plan.tasks.items() for prompt in rows}
        self.rows: dict[int, dict[str, Any]] = {}
        self._tallies = {task: Tally(method.depth) for task in plan.tasks}
        for row in read_rows(writer.path):
            self._keep(row)

    def add(self, row: dict[str, Any]) -> bool:
        """Take an output row; return whether its tokens differ from those it had before."""
        number = row["index"]
        before = self.rows.get(number)
        if before is not None:
            return [t.output_ids for t in turns_of(before)] != [t.output_ids for t in turns_of(row)]
        placed = {**row, "index": self._place[number], "row": number, "task": self._task[number]}
        self._keep(placed)
        self._writer.append(placed)
        return False

    def has_all(self, task: str) -> bool:
        """Whether every row of a task is there."""
        return all(prompt.index in self.rows for prompt in self._plan.tasks[task])

    def tally(self, task: str | None = None) -> Tally:
        """Return the sums over the rows that are there, of one task or of all."""
        if task is not None:
            return self._tallies[task]
        tally = Tally(self._method.depth)
        for row in self.rows.values():
            tally.add(row)
        return tally

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows[row["row"]] = row
        self._tallies[row["task"]].add(row)


@contextlib.contextmanager
def open_rows(
    directory: Path, methods: Sequence[Method], plan: Plan, base: str, overwrite: bool
) -> Iterator[dict[str, RowFile]]:
    """Open DIR/rows/NAME.jsonl of every method; only the same settings resume one."""
    # Not batch sizes and repeats: they change times, which are kept by leg, and no row.
    common = {"base": base, "run_seed": plan.seed, **plan.settings.to_dict()}
    with contextlib.ExitStack() as stack:
        files = {}
        for method in methods:
            writer = RowWriter(
                directory / ROWS / f"{method.name}.jsonl",
                settings={"draft": method.source, **common, **method.models.identity()},
                prompts_hash=prompts_hash(plan.prompts),
                overwrite=overwrite,
            )
            files[method.name] = RowFile(stack.enter_context(writer), plan, method)
        yield files


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
                    with self._bar(batch_size, keys) as bar:
                        self._run_legs(keys, compiling, bar)

    def _warm_up(self, batch_size: int) -> None:
        """Compile all programs, before the bar begins to reckon how long the rest takes."""
        for name, method in self._methods.items():
            note = f"compiling for {name}, batch size {batch_size}"
            with passing_note(note), memory_advice(batch_size):
                warm_up(method, self._engines[batch_size][name], self._plan.longest)

    def _bar(self, batch_size: int, keys: Sequence[LegKey]) -> Progress:
        def rows(keys: Iterable[LegKey]) -> int:
            return sum(len(self._plan.tasks[key.task]) for key in keys)

        every = self._plan.legs(list(self._methods.values()))
        total = rows(key for key in every if key.batch_size == batch_size)
        return progress_bar(total, f"batch size {batch_size}", "row", initial=total - rows(keys))

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
        maker, tokens, changed = RowMaker(), 0, 0
        started, compiled_before = time.perf_counter(), compiling.seconds
        with memory_advice(key.batch_size):
            for event in stream:
                row = maker.take(event)
                if row is None:
                    continue
                tokens += sum(len(turn.output_ids) for turn in turns_of(row))
                is_new = row["index"] not in file.rows
                changed += file.add(row)
                reason = row.get("error") or row.get("skipped")
                if reason and is_new:
                    what = "failed" if "error" in row else "skipped"
                    bar.write(f"{name}: row {row['index']} {what}: {reason}")
                speed_now = tokens / (time.perf_counter() - started)
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
                rows_changed=changed,
                session=self._journal.session,
            )
        )

    def _figures(self, key: LegKey, tokens_per_second: float) -> str:
        tau = self._files[key.method].tally(key.task).tau
        shown = "" if tau is None else f"tau {tau:.2f}, "
        return f"{key.task} {key.method} #{key.repeat + 1}, {shown}{tokens_per_second:.0f} tokens/s"

    def _task_line(self, batch_size: int, task: str) -> str:
        """Return what is known of a task that every method has finished."""
        plain = self._journal.select(batch_size=batch_size, task=task, method=VANILLA)
        parts = []
        for name, file in self._files.items():
            legs = self._journal.select(batch_size=batch_size, task=task, method=name)
            measured = speed(legs, plain)
            rate = measured["tokens_per_second"]
            text = f"{name} {rate['median']:.0f} tokens/s" if rate else name
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
        compared = [
            compare_rows(mine[prompt.index], plain[prompt.index])
            for prompt in self._plan.tasks[task]
        ]
        return sum(one.is_compared and one.divergence is None for one in compared)
