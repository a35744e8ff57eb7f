"""Prompt rows through an engine: each turn is a request; a bad row is reported and left out."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.engine import Engine, Learner
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import AcceptedLengths, Request, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings, Grain, sampling_for
from clover_jax.decoding.row_state import RowState, Skipped, TurnProgress
from clover_jax.errors import UserError
from clover_jax.runtime.dtypes import exact_matmuls


class RowTotals(AcceptedLengths):
    """Sums over output rows, of an earlier run too."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()):
        super().__init__()
        self.rows = self.failed = self.skipped = 0
        for row in rows:
            self.add_row(row)

    def add_row(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self.failed += "error" in row
        self.skipped += "skipped" in row
        for output_ids, accepted in turn_columns(row, ("output_ids", "accepted")):
            self.add(len(output_ids), accepted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "tokens": self.tokens,
            "target_forwards": self.forwards,
            "accepted_histogram": self.histogram(),
            "rows": self.rows,
            "failed": self.failed,
            "skipped": self.skipped,
        }

    def summary(self, tokens_per_second: float | None) -> str:
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        speed = "" if tokens_per_second is None else f", {tokens_per_second:.0f} tokens/s"
        counts = self.histogram()
        # Lengths that never happened are left out, since copies may accept 25 tokens at once.
        shares = []
        for accepted, count in enumerate(counts):
            share = 100 * count / max(self.forwards, 1)
            if count:
                shares.append(f"{accepted}: {f'{share:.0f}' if share >= 0.5 else 'below 1'} %")
        drafted = (
            f"; drafted tokens accepted per forward: {', '.join(shares)}" if counts[1:] else ""
        )
        return f"tau {tau}, {self.tokens} tokens in {self.forwards} forwards{speed}{drafted}"


def turn_columns(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield these columns of every turn of an output row; none of a failed or skipped row."""
    if "output_ids" not in row:
        return
    columns = [row[name] for name in names]
    if isinstance(row["finish_reason"], list):
        # Several turns: each column is a list with one entry per turn.
        yield from zip(*columns, strict=True)
    else:
        yield tuple(columns)


@dataclasses.dataclass(frozen=True)
class RowEvent:
    """New tokens of a row, or its end.

    prompt: the input row. progress: of its current turn; None if the row failed or was skipped.
    row: the output row at the end: {"index", ...}, {"index", "error"} or {"index", "skipped"}.
    """

    prompt: Prompt | BadPrompt
    progress: TurnProgress | None = None
    row: dict[str, Any] | None = None


def open_stream(
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
    settings: GenerationSettings,
    *,
    batch_size: int = 1,
    seed: int = 0,
    steps_per_chunk: int = 8,
    part: slice = slice(None),
    strict: bool = False,
    is_watched: bool = False,
    learner: Learner | None = None,
) -> RowStream:
    """Return the events of decoding rows, for commands and the library.

    batch_size: rows decoded at once, or all of them if there are fewer.
    part: the rows to decode, if an earlier run has decoded the others. The engine is made for all
        rows, so that these are the same as in one run.
    strict: a row that fails raises its UserError after the rows before it are finished.
    is_watched: whether events bring text while a row runs.
    learner: trains the head meanwhile; its head is used.
    """
    if not isinstance(batch_size, numbers.Integral):
        raise UserError(f"batch_size must be a whole number, not {batch_size!r}")
    if batch_size < 1:
        raise UserError(f"batch_size ({batch_size}) must be at least 1")
    left = prompts[part]
    engine = models.engine(
        batch_size=max(1, min(batch_size, len(left))),
        sampling=sampling_for(settings, prompts),
        seed=seed,
        steps_per_chunk=steps_per_chunk,
        source_size=source_size(models, prompts),
    )
    return RowStream(engine, models, left, settings, strict, is_watched, learner)


def source_size(models: Models, prompts: Iterable[Prompt | BadPrompt]) -> int:
    """Return the room, in tokens, that an engine needs for texts to copy from; 0 for none."""
    if not models.copies:
        return 0
    # A token has at least one byte, and a text is cut to the context.
    given = [row.prediction for row in prompts if isinstance(row, Prompt) and row.prediction]
    longest = max((len(text.encode()) for text in given), default=0)
    longest = min(longest, models.base.config.max_position_embeddings)
    texts = [size for size in (longest, len(models.copy_from)) if size]
    # A power of two, so that few programs are compiled; a padding token begins each text.
    return 1 << (sum(texts) + len(texts) - 1).bit_length() if texts else 0


class RowStream:
    """Decodes prompt rows in the slots of an engine; iterate over it once for the events.

    A row starts when a slot is free; rows end in any order. Float32 matmuls are exact here.
    """

    def __init__(
        self,
        engine: Engine,
        models: Models,
        prompts: Sequence[Prompt | BadPrompt],
        settings: GenerationSettings,
        strict: bool = False,
        is_watched: bool = False,
        learner: Learner | None = None,
    ):
        """Take the rows; with `strict` the first that fails raises its UserError.

        Then no further row starts, and the running rows are finished first.
        """
        self.batch_size = engine.batch_size
        self._engine, self._models, self._learner = engine, models, learner
        self._settings, self._strict = settings, strict
        self._watched_by: Grain | None = "forward" if is_watched else None
        self._failure: UserError | None = None
        # Index -> running row, or conversation between two turns.
        self._states: dict[int, RowState] = {}
        self._next_turns: collections.deque[Prompt] = collections.deque()
        self._not_decoded: collections.deque[RowEvent] = collections.deque()
        self._requests: Iterator[Request | None] = self._make_requests(iter(prompts))

    def warm_up(self) -> None:
        """Compile the programs before the first row, so that no row's time includes it."""
        first = next(self._requests)
        if first is not None:
            # The same number of positions, so the same buffers, without reading the prompt twice.
            most = first.max_new_tokens + len(first.prompt_ids) - 1
            ids = first.prompt_ids[:1]
            short = dataclasses.replace(first, prompt_ids=ids, max_new_tokens=most)
            for progress in self._stream(iter([short])):
                progress.stop()  # one chunk has compiled everything
        # The row itself has not been decoded.
        self._requests = itertools.chain([first], self._requests)

    def __iter__(self) -> Iterator[RowEvent]:
        for progress in self._stream(self._requests):
            # Rows that failed while slots were filled.
            yield from self._take_not_decoded()
            # The next turn of a conversation needs this answer; another row may take the slot.
            state = self._states[progress.row.index]
            try:
                taken = state.take(progress)
            except UserError as error:
                self._fail(state.prompt, error)
                continue
            row = state.output_row()
            if row is not None:
                del self._states[state.prompt.index]
            elif taken.ended:
                self._next_turns.append(state.prompt)
            yield RowEvent(state.prompt, taken, row)
        # Rows that failed after the last update, or all rows if none could be decoded.
        yield from self._take_not_decoded()
        if self._failure is not None:
            raise self._failure

    def _stream(self, requests: Iterator[Request | None]) -> Iterator[RowUpdate]:
        params, learner = self._models.base.params, self._learner
        draft = self._models.draft_params if learner is None else learner.params
        steps = self._engine.stream(params, draft, requests, learner)
        while True:
            # Around each step and not around the loop, which would include the consumer's work.
            with exact_matmuls(str(params["embedding"].dtype)):
                progress = next(steps, None)
            if progress is None:
                return
            yield progress

    def _take_not_decoded(self) -> Iterator[RowEvent]:
        while self._not_decoded:
            yield self._not_decoded.popleft()

    def _make_requests(self, prompts: Iterator[Prompt | BadPrompt]) -> Iterator[Request | None]:
        """Yield requests without end, or None while there are none.

        The next turn of a conversation comes before new rows.
        """
        while True:
            if self._next_turns:
                request = self._request(self._next_turns.popleft())
            else:
                prompt = None if self._failure else next(prompts, None)
                if prompt is None:
                    yield None
                    continue
                request = self._request(prompt)
            if request is not None:
                yield request

    def _request(self, prompt: Prompt | BadPrompt) -> Request | None:
        try:
            if isinstance(prompt, BadPrompt):
                raise UserError(prompt.error)
            if prompt.index not in self._states:
                state = RowState(prompt, self._settings, self._models, self._watched_by)
                self._states[prompt.index] = state
            request = self._states[prompt.index].next_request()
            try:
                self._engine.check(request)
            except UserError as error:
                raise UserError(f"{prompt.source}: {error}") from error
            return request

        # A bad row does not affect the others, unless `strict` asks for all or none.
        except Skipped as skipped:
            self._leave_out(prompt, "skipped", str(skipped))
        except UserError as error:
            self._fail(prompt, error)
        return None

    def _fail(self, prompt: Prompt | BadPrompt, error: UserError) -> None:
        if self._strict:
            self._failure = self._failure or error
            self._states.pop(prompt.index, None)
        else:
            self._leave_out(prompt, "error", str(error))

    def _leave_out(self, prompt: Prompt | BadPrompt, key: str, reason: str) -> None:
        # A conversation fails as a whole.
        self._states.pop(prompt.index, None)
        self._not_decoded.append(RowEvent(prompt, row={"index": prompt.index, key: reason}))
