"""Rows of rows/NAME.jsonl: how they are made, kept and added up.

They are rows of `generate` with what each forward proposed and accepted.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clover_jax.data.prompts import Prompt
from clover_jax.decoding.generate_run import RowSink, open_rows
from clover_jax.decoding.models import identity_of
from clover_jax.decoding.requests import AcceptedLengths
from clover_jax.decoding.row_stream import RowEvent, RowTotals, turn_columns
from clover_jax.evaluation.options import Options
from clover_jax.evaluation.plan import Method, Plan
from clover_jax.runtime.distributed import from_primary

_FIRST_BIN = 64
_NGRAM = 8  # consecutive tokens that are a repeat where they occurred before


class TurnRow(NamedTuple):
    """One answer of an output row.

    accepted, proposed, ranks: of each forward of the base, the number of drafted tokens that it
        accepted and that it verified, and for each accepted one how many siblings come before it.
    num_cut: prompt tokens for which the context had no room.
    copied: how many of the accepted tokens were copies of the text; empty for trees without copies.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]
    proposed: list[int]
    ranks: list[list[int]]
    num_cut: int
    copied: Sequence[int] = ()


def turns_of(row: Mapping[str, Any]) -> Iterator[TurnRow]:
    """Yield every turn of an output row; nothing for one that failed or was skipped."""
    # Rows of trees without copies have no such column.
    names = [name for name in TurnRow._fields if name != "copied" or name in row]
    yield from itertools.starmap(TurnRow, turn_columns(row, names))


class RowMaker:
    """Makes output rows from events; one for each pass over prompts."""

    def __init__(self):
        # Prompt's index -> columns; each list has an entry for every turn.
        self._forwards: dict[int, dict[str, list]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )

    def take(self, event: RowEvent) -> dict[str, Any] | None:
        """Read an event; return the output row if it ended one, with the prompt's index."""
        progress = event.progress
        if progress is not None and progress.ended:
            columns = self._forwards[event.prompt.index]
            # A stop string also cuts the forwards of the tokens after it.
            count = len(progress.turn.accepted)
            for name in ("proposed", "ranks", "copied"):
                columns[name].append(getattr(progress.generation, name)[:count])
            columns["num_cut"].append(progress.num_cut)
        if event.row is None:
            return None

        # A row that failed after some turns keeps none of them, as in `generate`.
        columns = self._forwards.pop(event.row["index"], {})
        if "output_ids" not in event.row:
            return event.row
        # A tree without copies has counted none.
        if not any(columns["copied"]):
            del columns["copied"]
        # A row of one turn has plain values, as `generate` writes them; others have a list.
        if isinstance(event.prompt, Prompt) and event.prompt.num_turns == 1:
            columns = {name: values[0] for name, values in columns.items()}
        return {**event.row, **columns}


class Tally(RowTotals):
    """Sums over output rows of one method: the figures of `generate`, and many more.

    `decoding/requests.py` has the definitions. Overall figures are sums over the forwards
    of all tasks (a micro-average), so a task with long answers counts more.
    """

    def __init__(self, depth: int):
        """Start empty; depth: of the method's tree, 0 for plain decoding."""
        super().__init__()
        self._failure: str | None = None
        self.truncated = self.turns = 0
        self._depth, self._proposed = depth, 0
        self._ranks: list[collections.Counter[int]] = [collections.Counter() for _ in range(depth)]
        self._context_forwards: collections.Counter[int] = collections.Counter()
        self._context_accepted: collections.Counter[int] = collections.Counter()
        # None until a row brings a count: trees without copies have none.
        self._copied: int | None = None
        self._ngrams = self._repeated = 0
        self._by_looping = {True: AcceptedLengths(), False: AcceptedLengths()}
        self._num_looping = 0

    def add_row(self, row: dict[str, Any]) -> None:
        # A row of several turns counts once there, and each of its turns below.
        super().add_row(row)
        self._failure = self._failure or row.get("error")
        turns = list(turns_of(row))
        self.truncated += any(turn.num_cut for turn in turns)
        for turn in turns:
            self._add_turn(turn)

    def _add_turn(self, turn: TurnRow) -> None:
        self.turns += 1
        self._proposed += sum(turn.proposed)
        if turn.copied:
            self._copied = (self._copied or 0) + sum(turn.copied)

        # Copies gain most where a text repeats itself, so such answers are counted separately.
        repeated, ngrams = count_repeats(turn.prompt_ids, turn.output_ids)
        # At least half of the 8-grams.
        is_looping = 0 < ngrams <= 2 * repeated
        self._repeated += repeated
        self._ngrams += ngrams
        self._num_looping += is_looping
        # Tokens that a limit or an end cut are part of the accepted lengths, not of tau.
        self._by_looping[is_looping].add(len(turn.output_ids), turn.accepted)

        # Each forward sees the prompt, prefill's token, and what the forwards before it emitted.
        context = len(turn.prompt_ids) + 1
        for accepted, ranks in zip(turn.accepted, turn.ranks, strict=True):
            self._context_forwards[context_bin(context)] += 1
            self._context_accepted[context_bin(context)] += accepted
            # One rank for each accepted token, that of the root's child first.
            for depth, rank in enumerate(ranks):
                self._ranks[depth][rank] += 1
            context += accepted + 1

    def to_dict(self) -> dict[str, Any]:
        depth = self._depth
        # Plain decoding drafts nothing, so its forwards are not drafts.
        per_position = self.reaching(depth)
        num_drafts = self.forwards if depth else 0
        return super().to_dict() | {
            "first_failure": self._failure,
            "truncated": self.truncated,
            "turns": self.turns,
            "extra_tokens": None if self.tau is None else self.tau - 1,
            "hit_rate": self.hit_rate(depth),
            "conditional_hit_rate": self.conditional_hit_rate(depth),
            "accepted_histogram": self.histogram(depth),
            "accepted_ranks": [
                [counts[k] for k in range(max(counts, default=-1) + 1)] for counts in self._ranks
            ],
            "by_context": [
                {
                    "from": start,
                    "to": 2 * start if start else _FIRST_BIN,
                    "forwards": forwards,
                    "mean_accepted": self._context_accepted[start] / forwards,
                }
                for start, forwards in sorted(self._context_forwards.items())
            ],
            "copied_tokens": self._copied,
            "repeats": {
                "ngrams": self._ngrams,
                "repeated": self._repeated,
                "looping_turns": self._num_looping,
                "tau_looping": self._by_looping[True].tau,
                "tau_not_looping": self._by_looping[False].tau,
            },
            # The same under vLLM's names.
            "num_drafts": num_drafts,
            "num_draft_tokens": self._proposed,
            "num_accepted_tokens": sum(per_position),
            "num_accepted_tokens_per_pos": per_position,
            "mean_acceptance_length": 1 + sum(per_position) / num_drafts if num_drafts else None,
        }


def context_bin(length: int) -> int:
    """Return the start of the bin of a context length: 0, 64, 128, 256, and so on.

    Example: 63 is in the bin from 0, 64 and 127 in the bin from 64, 128 in the bin from 128.
    """
    # Bins double: acceptance changes with the scale of a context, not with single tokens.
    return 0 if length < _FIRST_BIN else 1 << (length.bit_length() - 1)


def count_repeats(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many 8-grams of an answer occurred before in prompt and answer, and how many are.

    Example: after the prompt 1 .. 9 the answer 1 .. 9 has 2 of 2, and 9 sevens have 1 of 2.
    """
    row = [*prompt_ids, *output_ids]
    before, repeated = set(), 0
    for end in range(_NGRAM, len(row) + 1):
        ngram = tuple(row[end - _NGRAM : end])
        # An n-gram that begins in the prompt is not the answer's own.
        repeated += end - _NGRAM >= len(prompt_ids) and ngram in before
        before.add(ngram)
    return repeated, max(len(output_ids) - _NGRAM + 1, 0)


class RowFile:
    """One method's rows: kept on disk as they first came, and in the memory of every process.

    A row's "index" is its place when tasks follow one another; "row" is its place in the input.
    """

    def __init__(self, sink: RowSink, plan: Plan, method: Method):
        """Take the open sink, and read the rows of an earlier session."""
        self._sink, self._depth = sink, method.models.tree.depth
        self._place = {prompt.index: place for place, prompt in enumerate(plan.prompts)}
        self._task = {prompt.index: task for task, rows in plan.tasks.items() for prompt in rows}
        self.rows: dict[int, dict[str, Any]] = {}
        self._tallies = {task: Tally(self._depth) for task in plan.tasks}
        # One process has the file; all of them count its rows.
        for row in from_primary(lambda: list(sink.kept())):
            self._keep(row)

    def add(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Keep a new output row; return it if its tokens differ from those that were kept."""
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

    def tally(self, task: str | None = None) -> Tally:
        """Return the sums over the rows that are there, of one task or of all."""
        if task is not None:
            return self._tallies[task]
        # Rare, so it is not kept as rows come.
        tally = Tally(self._depth)
        for row in self.rows.values():
            tally.add_row(row)
        return tally

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows[row["row"]] = row
        self._tallies[row["task"]].add_row(row)


@contextlib.contextmanager
def open_row_files(
    options: Options, methods: Sequence[Method], plan: Plan
) -> Iterator[dict[str, RowFile]]:
    """Open DIR/rows/NAME.jsonl of every method; only the same settings resume one."""
    # Batch sizes and repeats change times, which are kept by pass, but no row.
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
