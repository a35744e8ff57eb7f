"""The row file of every method, and the sums over its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.options import Options
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.rows import turns_of
from clover_jax.evaluation.tally import Tally
from clover_jax.generation.output import open_rows
from clover_jax.loading.identity import identity_of
from clover_jax.runtime.distributed import from_primary
from clover_jax.storage.row_writer import RowSink


class RowFile:
    """One method's rows: kept on disk as they first came, and in the memory of every process.

    A row's "index" is its place when tasks follow one another; "row" is its place in the input.
    """

    def __init__(self, sink: RowSink, plan: Plan, method: Method):
        """Take the open sink, and read what an earlier session has left."""
        self._sink, self._method, self._plan = sink, method, plan
        self._place = {prompt.index: place for place, prompt in enumerate(plan.prompts)}
        self._task = {prompt.index: task for task, rows in plan.tasks.items() for prompt in rows}
        self.rows: dict[int, dict[str, Any]] = {}
        self._tallies = {task: Tally(method.depth) for task in plan.tasks}
        # One process has the file; all of them count its rows.
        for row in from_primary(lambda: list(sink.kept())):
            self._keep(row)

    def add(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Take an output row; return it as it is kept if its tokens are not those it had before."""
        # Prompts are numbered by their place in the input, which tasks need not follow.
        number = row["index"]
        placed = {**row, "index": self._place[number], "row": number, "task": self._task[number]}
        before = self.rows.get(number)
        if before is None:
            self._keep(placed)
            self._sink.append(placed)
            return None

        # Only tokens are compared: times and counts may differ between passes.
        old, new = ([turn.output_ids for turn in turns_of(one)] for one in (before, row))
        return None if old == new else placed

    def has_all(self, task: str) -> bool:
        """Whether every row of a task is there."""
        return all(prompt.index in self.rows for prompt in self._plan.tasks[task])

    def tally(self, task: str | None = None) -> Tally:
        """Return the sums over the rows that are there, of one task or of all."""
        if task is not None:
            return self._tallies[task]
        # Rare, so it is not kept as rows come.
        tally = Tally(self._method.depth)
        for row in self.rows.values():
            tally.add(row)
        return tally

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows[row["row"]] = row
        self._tallies[row["task"]].add(row)


@contextlib.contextmanager
def open_row_files(
    options: Options, methods: Sequence[Method], plan: Plan
) -> Iterator[dict[str, RowFile]]:
    """Open DIR/rows/NAME.jsonl of every method; only the same settings resume one."""
    # Not batch sizes and repeats: they change times, which are kept by pass, and no row.
    common = {"base": options.spec.base, "run_seed": plan.seed, "tasks": list(plan.tasks)}
    common |= plan.settings.to_dict()
    with contextlib.ExitStack() as stack:
        files = {}
        for method in methods:
            path = options.rows_path(method.name)
            depends_on = {"draft": method.source, **common, **identity_of(method.models)}
            sink = open_rows(path, plan.prompts, depends_on, options.overwrite)
            files[method.name] = RowFile(stack.enter_context(sink), plan, method)
        yield files
