"""Continuous batching: the rows that an engine decodes together join, run and leave one by one.

Chunked prefill: the prompt of a row that joins is read as a batch of one, chunk by chunk, while the
other rows keep their state. Then the row is inserted into its slot. Prefix caching: a slot keeps
the KV caches of its last row, and a prompt that begins alike reuses them. So the next turn of a
conversation begins where the last one ended.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from clover_jax.array_types import Array
from clover_jax.decoding.chunk import Records, read_records
from clover_jax.decoding.commit import StepRecord
from clover_jax.decoding.requests import NewTokens, Request, TokenScore
from clover_jax.decoding.scores import Scores, read_scores
from clover_jax.decoding.state import EOS, LENGTH, DecodeState, Text
from clover_jax.decoding.step import Weights
from clover_jax.drafters.drafter import DraftCache
from clover_jax.runtime.compile_clock import CompileClock

if TYPE_CHECKING:
    from clover_jax.decoding.engine import Engine

_FINISH_REASONS = {EOS: "eos", LENGTH: "length"}  # of rows that the device has ended


@dataclasses.dataclass
class _Row:
    """A request in its slot.

    state: a batch of one while the prompt is read; None before and after.
    num_read: prompt tokens that are in the KV cache. num_cached: those of them that a slot had.
    num_new: new tokens that `take` has returned.
    """

    request: Request
    started: float
    state: DecodeState | None = None
    num_read: int = 0
    num_cached: int = 0
    num_new: int = 0
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    first_score: list[TokenScore] = dataclasses.field(default_factory=list)

    @property
    def is_read(self) -> bool:
        return self.num_read >= len(self.request.prompt_ids)


class _Reads(NamedTuple):
    """Chunks of prompts that were started; last: an array that is ready when the last one is."""

    started: float
    number: int
    last: Array


class _Chunk(NamedTuple):
    """Steps that were started, and copies of their results: the next steps donate the state.

    rows: by slot. started, ended: when the steps began, and when the host saw their end.
    """

    rows: dict[int, _Row]
    text: Text
    records: Records
    started: float
    ended: float = 0.0


class Slots:
    """The slots of an engine, and what the host knows of each. Not safe for several threads.

    Call `add`, `read_prompts` and `advance` in turns. To overlap the host's work with the device's,
    call `begin`, work, `wait`, `add`, `begin` the next chunk, and `take` the results of the last.

    step_seconds: how long the last step took; None before the first.
    """

    def __init__(
        self, engine: Engine, weights: Weights, compiling: CompileClock, size: int | None = None
    ):
        """Begin with empty slots.

        compiling: its seconds are not counted as time of rows.
        size: length of the buffers; None lets them grow with the longest request.
        """
        self._engine, self._weights, self._compiling = engine, weights, compiling
        self._state: DecodeState | None = None
        if size is not None:
            self._state = engine.empty_state(size, weights)
        count = engine.batch_size
        self._rows: list[_Row | None] = [None] * count
        self._reading: collections.deque[int] = collections.deque()  # slots, the oldest first
        # For prefix caching: the tokens whose keys and values a slot holds, the base's and the
        # head's.
        self._held = [np.zeros(0, np.int32)] * count
        self._beginnings: list[DraftCache] = [()] * count  # of the head's, for `state.extract`
        self._last_used = [0] * count
        self._num_joined = 0

        # Work that the device has, and results that `take` has not returned yet.
        self._reads: _Reads | None = None
        self._begun: _Chunk | None = None
        self._done: _Chunk | None = None
        self.step_seconds: float | None = None
        self._read_seconds = math.inf  # how long the last chunk of a prompt took

    @property
    def state(self) -> DecodeState | None:
        """The state before the next step; None before the first row."""
        return self._state

    @property
    def num_free(self) -> int:
        """How many more requests may be added."""
        return self._rows.count(None)

    @property
    def num_reading(self) -> int:
        """Rows whose prompts are still to be read."""
        return len(self._reading)

    def add(self, request: Request) -> int:
        """Give a request a free slot and return it; `read_prompts` reads its prompt.

        Raises UserError for a request that the engine refuses.
        """
        self._engine.check(request)
        prompt = self._sharable(request)

        # The slot whose text the prompt continues (more than half of it is shared), else the one
        # whose row joined first: the texts of the others may still serve as prefixes.
        def order(slot: int) -> tuple[bool, int]:
            continues = 2 * self._shared(slot, prompt) > len(self._held[slot])
            return not continues, self._last_used[slot]

        slot = min((slot for slot, row in enumerate(self._rows) if row is None), key=order)
        self._rows[slot] = _Row(request, self._compiling.now())
        self._reading.append(slot)
        self._num_joined += 1
        self._last_used[slot] = self._num_joined
        return slot

    def remove(self, slot: int) -> None:
        """Let the row in a slot go; the slot is free at once."""
        self._rows[slot] = None
        if slot in self._reading:
            self._reading.remove(slot)
        elif self._state is not None:
            self._state = self._engine.states.clear(self._state, slot)

    def chunks_within(self, seconds: float) -> int:
        """Return how many chunks of prompts fit into a time, as the last ones did; at least 1."""
        return max(1, int(seconds / self._read_seconds))

    def read_prompts(self, num_chunks: int | None = None) -> None:
        """Start to read the prompts that wait, first come first served.

        num_chunks: read at most this many chunks; None: all.
        """
        # All are started at once, so that the device never waits for the host.
        started, count = self._compiling.now(), 0
        while self._reading and count != num_chunks:
            last, count = self._read_chunk(self._reading[0]), count + 1
            self._reads = _Reads(started, count, last)

    def advance(self, num_steps: int | None = None) -> list[NewTokens]:
        """Run a chunk of steps for the rows whose prompts are read, and return their new tokens.

        num_steps: at most this many, and no more than the engine's chunk has.
        """
        self.begin(num_steps)
        self.wait()
        return self.take()

    def begin(self, num_steps: int | None = None) -> None:
        """Start a chunk of steps as `advance` does; only `take` may be called before `wait`."""
        rows = {slot: row for slot, row in enumerate(self._rows) if row is not None and row.is_read}
        if self._state is None or not rows:
            return
        filled = np.array([slot in rows for slot in range(len(self._rows))])
        decode = self._engine.programs([row.request for row in rows.values()]).decode
        started = self._compiling.now()
        self._state, records = decode(self._weights, self._state, filled, num_steps)
        self._begun = _Chunk(rows, self._engine.text(self._state), records, started)

    def wait(self) -> list[int]:
        """Wait for the device; return the slots whose rows have ended, which are free now."""
        # `read_prompts` returns before the chunks are read; their time is taken here.
        if self._reads is not None:
            jax.block_until_ready(self._reads.last)
            now = self._compiling.now()
            self._read_seconds = (now - self._reads.started) / self._reads.number
            if self._begun is not None:
                self._begun = self._begun._replace(started=now)
            self._reads = None
        if self._begun is None:
            return []

        # The slot of an ended row is free for the next request before its last tokens are taken.
        finish = np.asarray(self._begun.text.finish)
        self._done, self._begun = self._begun._replace(ended=self._compiling.now()), None
        ended = [slot for slot in self._done.rows if int(finish[slot]) in _FINISH_REASONS]
        for slot in ended:
            self._rows[slot] = None
        return ended

    def take(self) -> list[NewTokens]:
        """Return the new tokens of the last chunk that has ended; each chunk's only once."""
        chunk, self._done = self._done, None
        if chunk is None:
            return []
        text, record = jax.device_get(chunk.text), read_records(chunk.records)
        given = [
            _collect(row, slot, text, record, chunk.ended - row.started)
            for slot, row in chunk.rows.items()
        ]

        # Note the texts for prefix caching, but not where another row has the slot by now.
        for slot, row in chunk.rows.items():
            if self._rows[slot] is None or self._rows[slot] is row:
                self._held[slot] = self._kept(row.request, text.tokens[slot, : text.end[slot]])
        if count := max(len(new.accepted) for new in given):
            self.step_seconds = (chunk.ended - chunk.started) / count
        return given

    def _read_chunk(self, slot: int) -> Array:
        """Start to read the next chunk of a slot's prompt; after the last one insert the row.

        Returns an array that is ready when the chunk is read.
        """
        row = self._rows[slot]
        assert row is not None  # as everything in `_reading`
        engine, request = self._engine, row.request
        if row.state is None:
            self._state = engine.room_for(self._state, request, self._weights)
            # Where a slot holds the beginning of this prompt, its caches are the row's.
            prompt = self._sharable(request)
            shared = [self._shared(other, prompt) for other in range(len(self._rows))]
            row.num_read = row.num_cached = max(shared)
            nearest = shared.index(row.num_read)
            begun = None
            if row.num_read:
                begun = engine.states.extract(self._state, nearest, self._beginnings[nearest])
            row.state = engine.row_state(request, self._state, begun)

        row.state, scores = engine.read_prompt(self._weights, row.state, request, row.num_read)
        if scores is not None:
            self._note_scores(row, scores)
        row.num_read += engine.prefill_size
        end = row.state.end
        if row.is_read:
            assert self._state is not None  # made above
            self._beginnings[slot] = engine.states.draft_beginning(row.state)
            self._state = engine.states.insert(self._state, slot, row.state)
            row.state = None
            self._held[slot] = self._kept(request, np.array(request.prompt_ids))
            self._reading.popleft()
        return end

    def _note_scores(self, row: _Row, scores: Scores) -> None:
        """Keep the scores that a chunk gives to the prompt's tokens and to the first new one."""
        # Position i scores the token after it.
        left = len(row.request.prompt_ids) - 1 - row.num_read
        found = read_scores(scores, (0,), min(left + 1, self._engine.prefill_size))
        if left < self._engine.prefill_size:
            row.first_score = [found.pop()]
        if row.request.wants_prompt_scores:
            row.prompt_scores += found

    def _sharable(self, request: Request) -> np.ndarray:
        """Return the tokens of a prompt that may come from another row's cache: all or none.

        No tokens for a head that learns from what it reads (recycle): another row's text would
        change its accepted lengths. No tokens where the prompt's own scores are wanted.
        """
        head = self._engine.config.head
        learns = head is not None and head.module.observes
        is_read_whole = learns or request.wants_prompt_scores
        return np.array([] if is_read_whole else request.prompt_ids, np.int32)

    def _shared(self, slot: int, prompt: np.ndarray) -> int:
        """Return how many tokens of a prompt can come from a slot's cache: whole chunks.

        So the rest is read in the same chunks as without the cache. A head pairs a position with
        the token after it, so that token must be the same too.
        """
        size = min(len(self._held[slot]), len(prompt))
        differ = self._held[slot][:size] != prompt[:size]
        same = int(differ.argmax()) if differ.any() else size
        chunk = self._engine.prefill_size
        return max(same - 1, 0) // chunk * chunk

    def _kept(self, request: Request, text: np.ndarray) -> np.ndarray:
        """Return the part of a text that a slot's caches hold.

        The head absorbs the last step's tokens one step later, so they are left out.
        """
        pending, prompt = self._engine.config.tree.depth + 1, len(request.prompt_ids)
        # A prompt shorter than what is pending leaves no beginning that could be restored.
        size = max(len(text) - pending, prompt) if prompt > pending else 0
        return text[:size].copy()


def _collect(row: _Row, slot: int, text: Text, record: StepRecord, seconds: float) -> NewTokens:
    """Return the new tokens that a chunk of steps gave a row, `seconds` after the row began."""
    # The text: between the tokens that are known and the row's end.
    first = len(row.request.prompt_ids) + row.num_new
    ids = text.tokens[slot, first : text.end[slot]].tolist()
    is_first, row.num_new = row.num_new == 0, row.num_new + len(ids)

    # The figures: only steps that emitted something ran for this row.
    emitted = np.asarray(record.emitted)[:, slot]
    steps = np.flatnonzero(emitted > 0)
    accepted = record.accepted[steps, slot].tolist()
    ranks = record.ranks[steps, slot].tolist()
    scores: list[TokenScore] = []
    if row.request.wants_scores and record.scores is not None:
        scores = list(row.first_score) if is_first else []
        for step in steps.tolist():
            scores += read_scores(record.scores, (step, slot), emitted[step])

    return NewTokens(
        slot=slot,
        ids=ids,
        accepted=accepted,
        proposed=record.proposed[steps, slot].tolist(),
        ranks=[path[:count] for path, count in zip(ranks, accepted, strict=True)],
        copied=[] if record.copied is None else record.copied[steps, slot].tolist(),
        seconds=seconds,
        finish_reason=_FINISH_REASONS.get(int(text.finish[slot])),
        scores=scores,
        prompt_scores=row.prompt_scores if is_first else [],
        num_cached=row.num_cached if is_first else 0,
    )
