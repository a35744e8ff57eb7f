"""Run the engine's own loop, to be timed: one call is one chunk of steps of all rows."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator

from clover_jax.decoding.requests import Generation, Request, RowUpdate
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.loading.models import Models
from clover_jax.timing.loops import STEPS
from clover_jax.timing.turns import WARM_UP, Run


class EngineRun:
    """An engine with full slots, whose rows continue from call to call."""

    def __init__(self, models: Models, sampling: SamplingConfig, batch: int):
        """Prepare an engine of `batch` slots that runs STEPS steps a call."""
        self._models, self._batch = models, batch
        self._engine = models.engine(batch, sampling, steps_per_chunk=STEPS)

    def chunks(self, context: int, end: int, rounds: int, pace: float | None) -> Run:
        """Return a function that runs the next chunk, for `time_in_turns` with `rounds` rounds.

        end: positions at which rows would end. The caller makes sure that none does while chunks
            are timed; buffers are as long as `cache_size` gives for `end` positions.
        pace: tokens that a row emits in a step; None measures it.
        """
        # Prompts are shorter than `context`, so that the round in the middle begins there.
        pace = self.pace(context, end) if pace is None else pace
        before = round((WARM_UP + rounds // 2) * STEPS * pace)
        stream = self._stream(max(context - before, 1), end)
        return lambda: self._take(stream)

    def pace(self, context: int, end: int) -> float:
        """Return the tokens that a row emits in a step, from `context` on, in WARM_UP chunks."""
        stream = self._stream(context, end)
        for _ in range(WARM_UP):
            rows = self._take(stream)
        # Closed early: only the accepted lengths so far are wanted.
        stream.close()
        return 1 + statistics.mean(count for row in rows for count in row.accepted)

    def _stream(self, length: int, end: int) -> Generator[RowUpdate]:
        # Any prompt will do, the same in every slot; rows end at `end`.
        prompt = [index % self._models.base.config.vocab_size for index in range(1, length + 1)]
        requests = [Request(index, prompt, end - length) for index in range(self._batch)]
        weights = self._models.weights
        return self._engine.stream(weights.base, weights.draft, requests)

    def _take(self, stream: Iterator[RowUpdate]) -> list[Generation]:
        """Return every row after the next chunk; its tokens are on the host by then."""
        return [next(stream).row for _ in range(self._batch)]
