"""The host's side of decoding: continuous batching of requests over compiled programs.

A free slot takes the next request at once. Chunked prefill: the prompt of a row that joins is read
as a batch of one, chunk by chunk, while the other rows keep their state; then the row is inserted
into its slot. Prefix caching: a slot keeps the KV caches of its last row, and a prompt that begins
with the same tokens reuses them, so the next turn of a conversation begins where the last one
ended. A delta net's state cannot be taken back, so of a base with such layers a prompt begins at a
snapshot: a slot keeps the states where its prompt left another's, and at its prompt's last whole
chunk. Nothing recompiles unless a request needs a longer bucket of buffers, or rules of sampling,
that no request before it needed.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.grammars import COUNTS, Grammars, fill_masks, problem_of
from clover_jax.decoding.programs import (
    Placement,
    Programs,
    Records,
    compile_programs,
    compile_state_programs,
    read_records,
)
from clover_jax.decoding.requests import (
    Generation,
    NewTokens,
    Request,
    RowUpdate,
    TokenScore,
    check_request,
    least_sampling,
)
from clover_jax.decoding.sampling import NO_TOKEN, Scores
from clover_jax.decoding.sampling_config import GREEDY, MOST_BIASED, SamplingConfig, check_seed
from clover_jax.decoding.state import EOS, EOS_ROOM, LENGTH, DecodeState, Text, bucket
from clover_jax.decoding.step import StepConfig, StepRecord, Weights, weights_for
from clover_jax.decoding.tree_config import Tree
from clover_jax.drafters.drafter import PAD_TOKEN, DraftCache
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.models.delta_net import DeltaState
from clover_jax.runtime.compile_clock import CompileClock

MOST_SNAPSHOTS = 2  # of a slot; each has a state of every delta net
_FINISH_REASONS = {EOS: "eos", LENGTH: "length"}  # of rows that the device has ended


class Learner(Protocol):
    """Trains the head between chunks of steps; `training/adapting.py` has one.

    params: the head's, to begin with.
    """

    params: Params

    def prepare(self, base_params: Params) -> None:
        """Compile what `learn` calls, once."""

    def watch(self, seconds: float, forwards: int, is_greedy: bool) -> None:
        """Note what a chunk of steps took, and whether all of its rows are greedy."""

    def take(self, text: np.ndarray, num_taken: int, is_last: bool) -> int:
        """Take a row's prompt and tokens so far; return how many tokens are taken by now.

        num_taken: what was returned for the row before, or the length of its prompt.
        """

    def learn(self, base_params: Params, now: Callable[[], float]) -> Params | None:
        """Return the head's new params; None where it takes no step now. now: a clock."""


@dataclasses.dataclass
class _Row:
    """A request in its slot.

    state: a batch of one while the prompt is read; None before and after.
    num_read: prompt tokens in the KV cache. num_cached: how many of these came from a slot.
    leaves_at: prompt tokens, whole chunks, that the prompt shares with a slot's text.
    snapshots: the states of delta nets after as many prompt tokens.
    num_new: new tokens that `take` has returned.
    matcher: of the request's form; it has read `num_matched` new tokens.
    forced: tokens that the form forces next, as far as they are drafted.
    error: why the row cannot go on.
    num_learned: tokens that need no learning: the prompt's, and those that a learner has taken.
    """

    request: Request
    started: float
    state: DecodeState | None = None
    num_read: int = 0
    num_cached: int = 0
    leaves_at: int = 0
    snapshots: dict[int, list[DeltaState]] = dataclasses.field(default_factory=dict)
    num_new: int = 0
    matcher: Any = None
    num_matched: int = 0
    forced: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None
    num_learned: int = 0
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    first_score: list[TokenScore] = dataclasses.field(default_factory=list)

    @property
    def is_read(self) -> bool:
        return self.num_read >= len(self.request.prompt_ids)

    def match(self, ids: Sequence[int]) -> None:
        """Let the matcher read new tokens."""
        self.num_matched += len(ids)
        # A token that ends the text need not match.
        kept = [id_ for id_ in ids if id_ not in self.request.eos_ids]
        if not self.matcher.consume_tokens(kept):
            self.error = self.error or f"the text cannot go on: {problem_of(self.matcher)}"

    def fill(self, tokens: Sequence[int], parent: Sequence[int], masks: np.ndarray) -> None:
        """Write the masks of a tree; they allow all tokens where the row cannot go on."""
        fill_masks(self.matcher, tokens, parent, masks, self.request.eos_ids)
        if self.matcher.is_error() or not masks[0].any():
            self.error = self.error or f"no token may come next: {problem_of(self.matcher)}"
        if self.error is not None:
            masks[:] = -1


class _Chunk(NamedTuple):
    """Steps that were started, and copies of their results: the next steps donate the state.

    rows: by slot. started, ended: when the steps began, and when the host saw their end.
    """

    rows: dict[int, _Row]
    text: Text
    records: Records
    started: float
    ended: float = 0.0


class Engine:
    """Decodes streams of requests in a fixed number of slots. Not safe for several threads.

    An engine is made for one base, head and tree; equal engines share compiled programs. `stream`
    decodes requests with the weights that it is passed, so that a head can be decoded while it
    trains. To drive the slots yourself, `open` an engine for some weights. Then call `add`,
    `read_prompts` and `advance` alternately. To overlap the host's work with the device's, call
    `begin`, work, `wait`, `add`, `begin` the next chunk, and `take` the results of the last.

    grammar_counts: the counts of `grammars`.
    state: the state before the next step; None before the first row.
    step_seconds: how long the last step took; None before the first.
    """

    def __init__(
        self,
        base: BaseConfig,
        head: DraftHead | None,
        tree: Tree,
        sampling: SamplingConfig = GREEDY,
        *,
        seed: int = 0,
        batch_size: int = 1,
        steps_per_chunk: int = 8,
        prefill_size: int | None = None,
        source_size: int = 0,
        adapts: bool = False,
        mesh: Mesh | None = None,
        attention: str = "xla",
        grammars: Grammars | None = None,
    ):
        """Prepare the programs; nothing compiles before the first request.

        seed: with a request's index, makes the key of a row whose request has no seed.
        prefill_size: prompt tokens read at once; by default 64 on CPU, else 256.
        source_size: tokens of other text to copy from that a request may bring, else truncated.
        adapts: run every chunk of steps with the cheapest rules of `sampling` that its rows allow,
            one program for each set of rules; otherwise all run with `sampling`.
        mesh: devices to decode on, None for one. Slots are then split over its data and fsdp axes;
            their number is rounded up so that all devices have as many.
        attention: implementation that reads the KV cache, as in `StepConfig`.
        grammars: of the base's tokenizer, for requests with a form.
        """
        # A CPU computes a chunk slowly, so a small one wastes less on short prompts.
        prefill_size = prefill_size or (64 if jax.default_backend() == "cpu" else 256)
        # Buffers are whole cache chunks long: prefill must end exactly where they do.
        if CACHE_CHUNK % prefill_size:
            raise ValueError(f"prefill_size ({prefill_size}) must divide {CACHE_CHUNK}")
        self.config = StepConfig(base, head, tree, sampling, attention)
        self._has_states = base.delta is not None

        # A mesh splits rows over devices, so the batch grows until all have as many.
        self.placement = Placement(mesh)
        self.batch_size = self.placement.whole_rows(batch_size)
        self.max_eos = max(EOS_ROOM, len(base.eos_token_ids))
        check_seed(seed)
        self._seed, self._grammars = seed, grammars
        self.grammar_counts = grammars.counts if grammars else dict.fromkeys(COUNTS, 0.0)
        self.prefill_size, self._source_size = prefill_size, source_size

        # Rules of sampling that change no state share the programs of states.
        room = SamplingConfig(biased=sampling.biased, penalized=sampling.penalized)
        alike = dataclasses.replace(self.config, sampling=room)
        self.states = compile_state_programs(alike, source_size, self.max_eos, self.placement)
        self._programs: dict[SamplingConfig, Programs] = {}
        self._steps_per_chunk, self._adapts = steps_per_chunk, adapts
        self._reset(Weights({}, {}), CompileClock(), None)

    def _reset(self, weights: Weights, compiling: CompileClock, learner: Learner | None) -> None:
        self._weights, self._compiling, self._learner = weights, compiling, learner
        self.state: DecodeState | None = None
        self._rows: list[_Row | None] = [None] * self.batch_size
        self._reading: collections.deque[int] = collections.deque()  # slots, the oldest first
        # For prefix caching: the tokens whose keys and values a slot holds.
        self._held = [np.zeros(0, np.int32)] * self.batch_size
        self._beginnings: list[DraftCache] = [()] * self.batch_size  # for `state.extract`
        self._snapshots: list[dict[int, list[DeltaState]]] = [{}] * self.batch_size
        self._last_used = [0] * self.batch_size
        self._num_joined = 0

        # Chunks of prompts that were started: when, how many, an array that is ready with the last.
        self._reads: tuple[float, int, Array] | None = None
        # Work that the device has, and results that `take` has not returned yet.
        self._begun: _Chunk | None = None
        self._done: _Chunk | None = None
        self.step_seconds: float | None = None
        self.read_seconds = math.inf  # how long the last chunk of a prompt took

    def open(
        self,
        base_params: Params,
        draft_params: Params | None,
        compiling: CompileClock,
        size: int | None = None,
        learner: Learner | None = None,
    ) -> Engine:
        """Return this engine with weights and with empty slots of its own.

        compiling: its seconds are not counted as time of rows.
        size: length of the buffers; None lets them grow with the longest request.
        learner: trains the head on the texts of these slots.
        """
        weights = self.placement.weights(weights_for(self.config.head, base_params, draft_params))
        opened = copy.copy(self)  # the compiled programs are shared
        opened._reset(weights, compiling, learner)
        if learner is not None:
            learner.prepare(weights.base)
        if size is not None:
            opened.state = opened._empty_state(size)
        return opened

    def stream(
        self,
        base_params: Params,
        draft_params: Params,
        requests: Iterable[Request | None],
        learner: Learner | None = None,
    ) -> Generator[RowUpdate]:
        """Decode requests as slots become free; yield every row's tokens as they come.

        requests: the next one is taken whenever a slot is free. None means none for now, as when
            the next turn of a conversation waits for an answer. The stream ends when every row has
            finished and the source is exhausted or yields None.
        learner: as `open` has it.
        """
        with CompileClock() as compiling:  # compilation is not counted as time of rows
            slots = self.open(base_params, draft_params, compiling, learner=learner)
            rows: dict[int, Generation] = {}
            source = iter(requests)
            while True:
                # Fill every free slot before the next steps; None now may be a request later.
                while slots.num_free and (request := next(source, None)) is not None:
                    row = Generation(request.index, list(request.prompt_ids))
                    rows[slots.add(request)] = row
                    slots.read_prompts()
                if not rows:
                    return

                # The consumer may stop a row when it sees its tokens.
                for new in slots.advance():
                    row = rows[new.slot]
                    row.add(new)
                    yield RowUpdate(row, new.ids, new.is_last)
                    if row.finish_reason is not None:
                        del rows[new.slot]
                        if not new.is_last:
                            slots.remove(new.slot)

    def prefilled(
        self, base_params: Params, draft_params: Params, requests: Sequence[Request]
    ) -> DecodeState:
        """Return a state whose first slots hold these requests, each with its first token."""
        slots = self.open(base_params, draft_params, CompileClock())
        for request in requests:
            slots.add(request)
        slots.read_prompts()
        if slots.state is None:
            raise ValueError("there is no request to prefill")
        return slots.state

    def buffer_size(self, num_positions: int) -> int:
        """Return the buffer length for rows of `num_positions` prompt and emitted tokens."""
        depth = self.config.tree.depth
        return bucket(num_positions + depth, self.config.base.max_position_embeddings + depth)

    def check(self, request: Request) -> None:
        """Raise UserError for a request that cannot be decoded with this base."""
        check_request(request, self.config.base, self.config.sampling, self.max_eos)
        if request.is_scored and not self._adapts:
            raise UserError("log-probabilities need an engine that adapts to its rows")
        self._matcher(request)

    def _matcher(self, request: Request) -> Any:
        """Return a matcher of the request's form, None without one; raises UserError."""
        if request.form is None:
            return None
        if self._grammars is None:
            raise UserError("structured_outputs need the base's tokenizer files, which are missing")
        return self._grammars.matcher(request.form)

    def programs(self, requests: Iterable[Request]) -> Programs:
        sampling = self.config.sampling
        if self._adapts:
            sampling = least_sampling(sampling, requests)
        if sampling not in self._programs:
            config = dataclasses.replace(self.config, sampling=sampling)
            sizes = self.prefill_size, self._steps_per_chunk
            programs = compile_programs(config, *sizes, self.placement)
            # The states of this engine may have room for what these rules do not read.
            room = {
                "bias": self.config.sampling.biased and not sampling.biased,
                "penalties": self.config.sampling.penalized and not sampling.penalized,
            }
            if unread := [name for name, is_unread in room.items() if is_unread]:
                programs = programs.for_states_with(*unread)
            self._programs[sampling] = programs
        return self._programs[sampling]

    @property
    def num_free(self) -> int:
        return self._rows.count(None)

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def add(self, request: Request) -> int:
        """Put a request into a free slot and return the slot; `read_prompts` reads its prompt."""
        self.check(request)
        prompt = self._sharable(request)

        # The slot whose text the prompt continues (more than half of it is shared), else the one
        # whose row joined first: the texts of the others may still serve as prefixes.
        def order(slot: int) -> tuple[bool, int]:
            continues = 2 * self._shared(slot, prompt) > len(self._held[slot])
            return not continues, self._last_used[slot]

        slot = min((slot for slot, row in enumerate(self._rows) if row is None), key=order)
        begun, num_given = self._compiling.now(), len(request.prompt_ids)
        self._rows[slot] = _Row(
            request, begun, matcher=self._matcher(request), num_learned=num_given
        )
        self._reading.append(slot)
        self._num_joined += 1
        self._last_used[slot] = self._num_joined
        return slot

    def remove(self, slot: int) -> None:
        """Remove the row from a slot; the slot is free at once."""
        self._rows[slot] = None
        if slot in self._reading:
            self._reading.remove(slot)
        elif self.state is not None:
            self.state = self.states.clear(self.state, slot)

    def read_prompts(self, num_chunks: int | None = None) -> None:
        """Start to read the prompts that wait, first come first served.

        num_chunks: read at most this many chunks; None: all.
        """
        # All are started at once, so that the device never waits for the host.
        started, count = self._compiling.now(), 0
        while self._reading and count != num_chunks:
            last, count = self._read_chunk(self._reading[0]), count + 1
            self._reads = started, count, last

    def advance(self, num_steps: int | None = None) -> list[NewTokens]:
        """Run a chunk of steps for the rows whose prompts are read, and return their new tokens.

        num_steps: at most this many, and no more than the engine's chunk has.
        """
        self.begin(num_steps)
        self.wait()
        news = self.take()
        self.learn()
        return news

    def begin(self, num_steps: int | None = None) -> None:
        """Start a chunk of steps as `advance` does; only `take` may be called before `wait`."""
        rows = {slot: row for slot, row in enumerate(self._rows) if row is not None and row.is_read}
        if self.state is None or not rows:
            return
        filled = np.array([slot in rows for slot in range(len(self._rows))])
        decode = self.programs([row.request for row in rows.values()]).decode
        # Where all rows have any token, their programs know no masks.
        is_masked = self._has_masks([row.request for row in rows.values()])
        making: list[Any] = []
        if is_masked:
            making = [functools.partial(each, rows) for each in (self._chains, self._masks)]
        started = self._compiling.now()
        self.state, records = decode(self._weights, self.state, filled, num_steps, *making)
        # The host reads copies, since the next steps consume the state.
        text = self.placement.copies(Text(self.state.tokens, self.state.end, self.state.finish))
        self._begun = _Chunk(rows, text, records, started)

    def _has_masks(self, requests: Sequence[Request]) -> bool:
        # An engine that does not adapt has one set of programs.
        has_form = any(request.form is not None for request in requests)
        return self.config.sampling.masked and (has_form or not self._adapts)

    def _chains(self, rows: dict[int, _Row]) -> dict[int, list[int]]:
        """Return the tokens that the rows' forms force next, by slot."""
        # The root must have been matched: the first one of a row is not known here.
        for row in rows.values():
            if row.num_matched > 0:
                row.forced = row.matcher.compute_ff_tokens()[: self.config.tree.depth]
        return {slot: row.forced for slot, row in rows.items() if row.forced}

    def _masks(self, rows: dict[int, _Row], tokens: np.ndarray, parent: np.ndarray) -> np.ndarray:
        """Return the tokens that may follow each slot of the rows' trees, as bits."""
        began, masks = time.perf_counter(), self._all_tokens(*tokens.shape)
        parent = np.broadcast_to(parent, tokens.shape)
        for slot, row in rows.items():
            if row.matcher is not None:
                if row.num_matched == 0:  # the first token came from the prompt's last chunk
                    row.match(tokens[slot, :1].tolist())
                row.fill(tokens[slot].tolist(), parent[slot].tolist(), masks[slot])
        self.grammar_counts["mask_seconds"] += time.perf_counter() - began
        return masks

    def _all_tokens(self, *shape: int) -> np.ndarray:
        return np.full((*shape, -(-self.config.base.vocab_size // 32)), -1, np.int32)

    def wait(self) -> list[int]:
        """Wait for the chunk; return the slots that are free now: their rows ended, or failed."""
        # `read_prompts` returns before the chunks are read; their time is taken here.
        if self._reads is not None:
            started, number, last = self._reads
            jax.block_until_ready(last)
            now = self._compiling.now()
            self.read_seconds = (now - started) / number
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

        return ended + self._match_forms(self._done)

    def _match_forms(self, chunk: _Chunk) -> list[int]:
        """Move the matchers behind a chunk's tokens; return the slots of rows that failed at it.

        The next masks are those after these tokens.
        """
        failed = []
        for slot, row in chunk.rows.items():
            if row.matcher is None:
                continue
            first = len(row.request.prompt_ids) + row.num_matched
            end = int(np.asarray(chunk.text.end)[slot])
            ids = np.asarray(chunk.text.tokens)[slot, first:end].tolist()

            # Of the tokens that the form forced, those up to the first other one were accepted.
            self.grammar_counts["draft_tokens"] += len(row.forced)
            same = [*map(operator.eq, row.forced, ids), False]
            self.grammar_counts["accepted_tokens"] += same.index(False)
            row.forced = []

            if self._rows[slot] is not row:  # it has ended
                continue
            row.match(ids)
            if row.error is not None:
                self.remove(slot)
                failed.append(slot)
        return failed

    def take(self) -> list[NewTokens]:
        """Return the new tokens of the last chunk that has ended; each chunk's only once."""
        chunk, self._done = self._done, None
        if chunk is None:
            return []
        text, record = jax.device_get(chunk.text), read_records(chunk.records)
        news = [
            _collect(row, slot, text, record, chunk.ended - row.started)
            for slot, row in chunk.rows.items()
        ]

        # Note the texts for prefix caching, but not where another row has the slot by now.
        for slot, row in chunk.rows.items():
            if self._rows[slot] is None or self._rows[slot] is row:
                self._held[slot] = self._kept(row.request, text.tokens[slot, : text.end[slot]])
        seconds, count = chunk.ended - chunk.started, max(len(new.accepted) for new in news)
        if count:
            self.step_seconds = seconds / count

        if (learner := self._learner) is not None:
            greedy = all(row.request.params.temperature == 0 for row in chunk.rows.values())
            learner.watch(seconds, count, greedy)
            for new, row in zip(news, chunk.rows.values(), strict=True):
                ids = text.tokens[new.slot, : text.end[new.slot]]
                row.num_learned = learner.take(ids, row.num_learned, new.is_last)
        return news

    def learn(self) -> None:
        """Let the learner make a step, if there is one and it wants to; the device is idle now.

        What the head's caches hold stays: it was computed with older params, which changes what is
        drafted and no text.
        """
        if self._learner is None:
            return
        params = self._learner.learn(self._weights.base, self._compiling.now)
        if params is not None:
            self._weights = self.placement.weights(self._weights.replace(draft=params))

    def _read_chunk(self, slot: int) -> Array:
        """Start to read the next chunk of a slot's prompt; after the last one insert the row.

        Returns an array that is ready when the chunk is read.
        """
        row = self._rows[slot]
        assert row is not None  # as everything in `_reading`
        if row.state is None:
            self._begin_row(row)

        # The last token is left for a program of its own where only it must be read again.
        request = row.request
        left = len(request.prompt_ids) - 1 - row.num_read
        programs, size = self.programs([request]), self.prefill_size
        read = programs.prefill
        if request.shares_prompt and left == 0:
            read, size = programs.read_last, 1
        masks = []
        if self._has_masks([request]):
            mask = self._all_tokens(1, 1)
            if row.matcher is not None:
                row.fill([PAD_TOKEN], [-1], mask[0])
            masks.append(self.placement.array(mask))
        row.state, scores = read(self._weights, row.state, np.int32(row.num_read), *masks)
        if scores is not None:
            # Position i scores the token after it, the last one the first new token.
            found = _read_scores(scores, (0,), min(left + 1, size))
            if left < size:
                row.first_score = [found.pop()]
            if request.wants_prompt_scores:
                row.prompt_scores += found

        row.num_read += size
        end = row.state.end
        # Where this prompt left another's, and where the next turn will leave this one's.
        last = (len(request.prompt_ids) - 1) // self.prefill_size * self.prefill_size
        if self._has_states and row.num_read in (row.leaves_at, last):
            row.snapshots[row.num_read] = self.states.snapshot(row.state)
        if row.is_read:
            self._beginnings[slot] = self.states.draft_beginning(row.state)
            self._snapshots[slot] = dict([*row.snapshots.items()][-MOST_SNAPSHOTS:])
            self.state = self.states.insert(self.state, slot, row.state)
            row.state = None
            self._held[slot] = self._kept(request, np.array(request.prompt_ids))
            self._reading.popleft()
        return end

    def _begin_row(self, row: _Row) -> None:
        """Make a row's own state, with the caches of a slot that holds the same beginning."""
        request = row.request
        size = self.buffer_size(self._limit(request))
        if self.state is None:
            self.state = self._empty_state(size)
        elif size > self.state.tokens.shape[1]:
            self.state = self.states.grow(self.state, size)

        prompt, whole = self._sharable(request), request.shares_prompt
        shared = [self._shared(slot, prompt, whole) for slot in range(len(self._rows))]
        row.leaves_at = max(shared)
        if self._has_states:
            # A state cannot be taken back: a row begins at a place of which there is a snapshot.
            known = zip(self._snapshots, shared, strict=True)
            shared = [max([0, *(n for n in some if n <= most)]) for some, most in known]
        row.num_read = row.num_cached = max(shared)
        row.state = self._new_row(request, self.state)
        if row.num_read:
            nearest = shared.index(row.num_read)
            states = self._snapshots[nearest].get(row.num_read, [])
            row.snapshots = {row.num_read: states} if states else {}
            begun = self.states.extract(self.state, nearest, self._beginnings[nearest], states)
            row.state = row.state.replace(cache=begun.cache, draft_cache=begun.draft_cache)

    def _empty_state(self, size: int) -> DecodeState:
        return self.states.empty(self.batch_size, size, self._weights.base["embedding"].dtype)

    def _new_row(self, request: Request, batch: DecodeState) -> DecodeState:
        """Return a batch of one for a request, before any of its prompt is read.

        batch: the state that it will be inserted into.
        """
        size, limit, length = batch.tokens.shape[1], self._limit(request), len(request.prompt_ids)
        if size < limit + self.config.tree.depth:
            # dynamic_update_slice would clamp, and overwrite live positions.
            raise ValueError(f"{size} positions are too few for {request}")

        def padded(ids: Sequence[int], room: int, fill: int) -> np.ndarray:
            row = np.full((1, room), fill, np.int32)
            row[0, : len(ids)] = ids[:room]
            return row

        # Padded to fixed shapes: nothing recompiles. A PAD_TOKEN begins each text to copy from.
        joined = [id_ for ids in request.sources for id_ in (PAD_TOKEN, *ids)]
        fields = {
            "tokens": padded(request.prompt_ids, size, 0),
            "end": np.array([length], np.int32),
            "limit": np.array([limit], np.int32),
            "eos": padded(request.eos_ids, self.max_eos, -1),
            "source": padded(joined, self._source_size, PAD_TOKEN) if self._source_size else None,
        }

        # Sampling: the fields of the row's RowSampling, `bias` and `penalties` as their fields.
        params = request.params
        settings: dict[str, Any] = {
            "temperature": np.array([params.temperature], np.float32),
            "top_k": np.array([min(params.top_k, self.config.base.vocab_size)], np.int32),
            "top_p": np.array([params.top_p], np.float32),
        }
        if self.config.sampling.biased:
            ids = padded([id_ for id_, _ in request.logit_bias], MOST_BIASED, NO_TOKEN)
            values = np.zeros((1, MOST_BIASED), np.float32)
            values[0, : len(request.logit_bias)] = [value for _, value in request.logit_bias]
            eos_from = np.array([min(length + request.min_new_tokens, limit)], np.int32)
            settings["bias"] = ids, values, eos_from
        if self.config.sampling.penalized:
            amounts = (
                *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
                params.min_p,
            )
            start = np.array([length], np.int32)
            settings["penalties"] = start, *(np.array([x], np.float32) for x in amounts)
        # A row without a seed still draws the same text in any batch: its index stands for it. A
        # later turn may draw at positions of an earlier one.
        index = request.index if request.seed is None else -1
        seed = self._seed if request.seed is None else request.seed
        key = np.uint32(seed), np.array([index, request.turn or -1], np.int32)
        # One program makes all arrays: one by one they took longer than a small base's prefill.
        return self.states.begin(size, batch.features.dtype, fields, settings, *key)

    def _limit(self, request: Request) -> int:
        context = self.config.base.max_position_embeddings
        return min(len(request.prompt_ids) + request.max_new_tokens, context)

    def _sharable(self, request: Request) -> np.ndarray:
        """Return the tokens of a prompt that may come from another row's cache: all or none.

        No tokens for a head that learns from the text that it reads (recycle): another row's text
        would change its accepted lengths. No tokens where the prompt's own scores are wanted.
        """
        head = self.config.head
        learns = head is not None and head.module.observes
        is_read_whole = learns or request.wants_prompt_scores
        return np.array([] if is_read_whole else request.prompt_ids, np.int32)

    def _shared(self, slot: int, prompt: np.ndarray, whole: bool = False) -> int:
        """Return how many tokens of a prompt can come from a slot's cache: whole chunks.

        So the rest is read in the same chunks as without the cache. A head pairs a position with
        the token after it, so that token must be the same too.
        whole: all but the last token of a prompt that the slot holds to its end.
        """
        size = min(len(self._held[slot]), len(prompt))
        same = int(np.logical_and.accumulate(self._held[slot][:size] == prompt[:size]).sum())
        chunk = 1 if whole and same == len(prompt) else self.prefill_size
        return max(same - 1, 0) // chunk * chunk

    def _kept(self, request: Request, text: np.ndarray) -> np.ndarray:
        """Return the part of a text that a slot's caches hold.

        The head absorbs the last step's tokens one step later, so they are left out.
        """
        pending, prompt = self.config.tree.depth + 1, len(request.prompt_ids)
        # A prompt shorter than the pending tokens leaves no beginning that could be restored.
        size = max(len(text) - pending, prompt) if prompt > pending else 0
        return text[:size].copy()


def _collect(row: _Row, slot: int, text: Text, record: StepRecord, seconds: float) -> NewTokens:
    """Return a row's new tokens from a chunk of steps, `seconds` after the row began."""
    # The text: from the tokens that were returned before to the row's end.
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
            scores += _read_scores(record.scores, (step, slot), emitted[step])

    finish = _FINISH_REASONS.get(int(text.finish[slot]))
    return NewTokens(
        slot=slot,
        ids=ids,
        accepted=accepted,
        proposed=record.proposed[steps, slot].tolist(),
        ranks=[path[:count] for path, count in zip(ranks, accepted, strict=True)],
        copied=[] if record.copied is None else record.copied[steps, slot].tolist(),
        seconds=seconds,
        finish_reason=finish if row.error is None else "error",
        error=row.error,
        scores=scores,
        prompt_scores=row.prompt_scores if is_first else [],
        num_cached=row.num_cached if is_first else 0,
    )


def _read_scores(scores: Scores, row: tuple[int, ...], count: int) -> list[TokenScore]:
    """Return the first `count` scores of a row; `row` indexes all axes before the tokens'."""
    # A TokenScore has the fields of Scores.
    columns = [np.asarray(getattr(scores, name))[row][:count] for name in TokenScore._fields]
    return [TokenScore(*each) for each in zip(*(c.tolist() for c in columns), strict=True)]
