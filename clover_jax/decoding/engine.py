"""The host's side of decoding: slots are kept full, steps run in chunks, text comes out in pieces.

A slot is refilled as soon as its row has finished: the next prompt is prefilled as a batch of one
and inserted, while the other rows keep their state. Nothing recompiles unless a request needs
longer buffers than any before (lengths come in buckets).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.chunk import Records, compile_chunk, read_records
from clover_jax.decoding.commit import StepRecord
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.prefill import prefill_chunk
from clover_jax.decoding.requests import Generation, Request, RowUpdate, check_request
from clover_jax.decoding.sampling import RowSampling
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig, check_seed
from clover_jax.decoding.state import (
    EMPTY,
    EOS,
    RUNNING,
    DecodeState,
    clear,
    empty_state,
    grow,
    insert,
)
from clover_jax.decoding.step import StepConfig, Weights, weights_for
from clover_jax.decoding.tree import Tree
from clover_jax.drafters.drafter import PAD_TOKEN
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.runtime.compile_clock import CompileClock


class Engine:
    """Decodes streams of requests in a fixed number of slots.

    One engine holds the compiled programs of one base, head and tree; weights are passed to each
    call, so that a head can be decoded while it trains.
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
        max_eos: int | None = None,
        source_size: int = 0,
        mesh: Mesh | None = None,
    ):
        """Prepare the programs; nothing compiles before the first request.

        seed: with a request's index, the key of rows that bring no seed of their own.
        prefill_size: prompt tokens read at once; by default 64 on CPU, else 256.
        max_eos: EOS tokens that a request may bring; by default 8, or more if the base has more.
        source_size: tokens of other text to copy from that a request may bring; more is left out.
        mesh: devices to decode on, None for one. Slots are then split over its data and fsdp axes,
            and made more, so that each device has as many.
        Raises UserError when the tree does not suit the head (see StepConfig).
        """
        # A CPU computes a chunk slowly, so a small one wastes less on short prompts.
        prefill_size = prefill_size or (64 if jax.default_backend() == "cpu" else 256)
        # Buffers are whole cache chunks long: prefill must end exactly where they do.
        if CACHE_CHUNK % prefill_size:
            raise ValueError(f"prefill_size ({prefill_size}) must divide {CACHE_CHUNK}")
        try:
            self.config = StepConfig(base, head, tree, sampling)
        except ValueError as error:
            raise UserError(str(error)) from error

        # A mesh splits rows over devices, so the batch grows until all have as many.
        self._placement = Placement(mesh)
        self.batch_size = self._placement.whole_rows(batch_size)
        self.max_eos = max_eos or max(8, len(base.eos_token_ids))
        check_seed(seed)
        self._seed = seed
        self._prefill_size, self._source_size = prefill_size, source_size

        # States are donated, so that every program updates caches in place.
        prefill = functools.partial(prefill_chunk, self.config, prefill_size)
        empty = functools.partial(empty_state, base, head, tree, source_size=source_size)
        compiled = self._placement.compiled
        self._prefill = compiled(prefill, donate_argnums=1)
        self._decode = compile_chunk(self.config, steps_per_chunk, self._placement)
        self._insert = compiled(insert, donate_argnums=0)
        self._grow = compiled(grow, static_argnums=1)
        self._clear = compiled(clear, donate_argnums=0)
        self._empty = compiled(empty, static_argnums=(0, 1, 2, 3))

    def seeded(self, seed: int) -> Engine:
        """Return an engine of the same programs whose rows draw by another seed."""
        check_seed(seed)
        other = copy.copy(self)
        other._seed = seed
        return other

    def generate(
        self,
        base_params: Params,
        draft_params: Params,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
    ) -> list[Generation]:
        """Decode all prompts and return them in order.

        Raises UserError for a prompt that `check` refuses.
        """
        requests = [Request(i, p, max_new_tokens, eos_ids) for i, p in enumerate(prompts)]
        rows = [p.row for p in self.stream(base_params, draft_params, requests) if p.done]
        return sorted(rows, key=lambda row: row.index)

    def stream(
        self, base_params: Params, draft_params: Params, requests: Iterable[Request | None]
    ) -> Generator[RowUpdate]:
        """Decode requests as slots become free; yield every row's tokens as they come.

        requests: asked for the next one whenever a slot is free; None means none for now, as when
            the next turn of a conversation waits for an answer. The stream ends when every row has
            finished and the source is exhausted or gives None.
        """
        weights = self._placement.weights(weights_for(self.config.head, base_params, draft_params))
        with CompileClock() as compiling:  # what is compiled meanwhile is no row's time
            yield from self._stream(weights, iter(requests), compiling)

    def _stream(
        self, weights: Weights, source: Iterator[Request | None], compiling: CompileClock
    ) -> Generator[RowUpdate]:
        # What the host knows of each slot: its row, and when that began.
        slots: list[Generation | None] = [None] * self.batch_size
        started = [0.0] * self.batch_size
        state: DecodeState | None = None
        while True:
            # Fill every free slot before the next steps; a source without a request may have one
            # later.
            for slot in [i for i, row in enumerate(slots) if row is None]:
                request = next(source, None)
                if request is None:
                    break
                started[slot] = time.perf_counter() - compiling.seconds
                state = self._fill(weights, state, slot, request)
                slots[slot] = Generation(request.index, list(request.prompt_ids))
            if all(row is None for row in slots):
                return

            # Run steps on the device, then read once what they gave.
            assert state is not None  # the first slot that was filled made it
            filled = np.array([row is not None for row in slots])
            state, records = self._decode(weights, state, filled)
            after = self._look(state, records)
            now = time.perf_counter() - compiling.seconds

            # Hand out the new tokens; an ended row leaves its slot to the next request.
            for slot, row in enumerate(slots):
                if row is not None:
                    yield _collect(row, slot, after, now - started[slot])
                    if row.finish_reason is not None:
                        slots[slot] = None
                        if after.finish[slot] == RUNNING:  # the consumer stopped it
                            state = self._clear(state, slot)

    def _look(self, state: DecodeState, records: Records) -> _AfterChunk:
        """Bring what a chunk gave to the host."""
        tokens, end, finish = self._placement.read((state.tokens, state.end, state.finish))
        return _AfterChunk(tokens, end, finish, read_records(records))

    def prefilled(
        self, base_params: Params, draft_params: Params, requests: Sequence[Request]
    ) -> DecodeState:
        """Return a state whose first slots hold these requests, each with its first token."""
        weights = self._placement.weights(weights_for(self.config.head, base_params, draft_params))
        state = None
        for slot, request in enumerate(requests):
            state = self._fill(weights, state, slot, request)
        if state is None:
            raise ValueError("there is no request to prefill")
        return state

    def buffer_size(self, num_positions: int) -> int:
        """Return the length of buffers for rows of so many prompt and emitted tokens."""
        depth = self.config.tree.depth
        return bucket(num_positions + depth, self.config.base.max_position_embeddings + depth)

    def check(self, request: Request) -> None:
        """Raise UserError for a request that cannot be decoded by this base."""
        check_request(request, self.config.base, self.config.sampling, self.max_eos)

    def _limit(self, request: Request) -> int:
        context = self.config.base.max_position_embeddings
        return min(len(request.prompt_ids) + request.max_new_tokens, context)

    def _fill(
        self, weights: Weights, state: DecodeState | None, slot: int, request: Request
    ) -> DecodeState:
        """Prefill a request into a slot; without a state make one."""
        state = self._room_for(state, request, weights.base)
        row = self._prefill_row(weights, request, state.tokens.shape[1], state)
        return self._insert(state, slot, row)

    def _room_for(
        self, state: DecodeState | None, request: Request, base_params: Params
    ) -> DecodeState:
        """Return the state with buffers long enough for the request."""
        self.check(request)
        size = self.buffer_size(self._limit(request))
        if state is None:
            dtype = base_params["embedding"].dtype
            return self._empty(self.batch_size, size, self.max_eos, dtype)
        return self._grow(state, size) if size > state.tokens.shape[1] else state

    def _prefill_row(
        self, weights: Weights, request: Request, size: int, like: DecodeState
    ) -> DecodeState:
        if size < self._limit(request) + self.config.tree.depth:
            # dynamic_update_slice would clamp, and overwrite live positions.
            raise ValueError(f"{size} positions are too few for {request}")

        # The prompt and its EOS ids are padded to fixed shapes, so that nothing recompiles.
        prompt = np.zeros((1, size), np.int32)
        length = len(request.prompt_ids)
        prompt[0, :length] = request.prompt_ids
        eos = np.full((1, self.max_eos), -1, np.int32)
        eos[0, : len(request.eos_ids)] = request.eos_ids

        # A batch of one with the prompt in place; prefill fills its caches chunk by chunk.
        row = self._empty(1, size, self.max_eos, like.cache[0].key.dtype).replace(
            tokens=self._placement.array(prompt),
            end=self._placement.array([length], np.int32),
            limit=self._placement.array([self._limit(request)], np.int32),
            eos=self._placement.array(eos),
            sampling=self._row_sampling(request),
            source=self._source(request),
        )
        for start in range(0, length, self._prefill_size):
            row = self._prefill(weights, row, np.int32(start))
        return row

    def _source(self, request: Request) -> Array | None:
        """Return what a request brought to copy from, each text begun by a PAD_TOKEN."""
        if not self._source_size:
            return None
        joined = [id_ for ids in request.sources for id_ in (PAD_TOKEN, *ids)]
        source = np.full((1, self._source_size), PAD_TOKEN, np.int32)
        source[0, : len(joined)] = joined[: self._source_size]
        return self._placement.array(source)

    def _row_sampling(self, request: Request) -> RowSampling:
        # A row without a seed still draws the same text in any batch: its index stands for it.
        if request.seed is None:
            key = jax.random.fold_in(jax.random.key(self._seed), request.index)
        else:
            key = jax.random.key(request.seed)
        # A later turn may draw at positions of an earlier one.
        if request.turn:
            key = jax.random.fold_in(key, request.turn)
        top_k = min(request.top_k, self.config.base.vocab_size)
        return RowSampling(
            key=self._placement.array(jax.random.key_data(key)[None]),
            temperature=self._placement.array([request.temperature], np.float32),
            top_k=self._placement.array([top_k], np.int32),
            top_p=self._placement.array([request.top_p], np.float32),
        )


def bucket(size: int, longest: int | None = None) -> int:
    """Return the buffer length for `size` positions: a power of two times the cache chunk.

    longest: positions that a buffer needs at most. The last power of two is cut to the quarter that
        holds them: contexts are powers of two, and a tree's depth more would double every cache.

    Example: of 8197 positions at most, 4097 have 8192 and 8193 have 10240, not 16384.
    """
    length = CACHE_CHUNK
    while length < size:
        length *= 2
    quarter = length // 8  # of what the power of two below leaves to it
    if longest is None or longest > length or quarter % CACHE_CHUNK:
        return length
    return -(-longest // quarter) * quarter


class _AfterChunk(NamedTuple):
    """What the host reads after a chunk of steps: leaves of the state, and the steps' records."""

    tokens: np.ndarray
    end: np.ndarray
    finish: np.ndarray
    record: StepRecord


def _collect(row: Generation, slot: int, after: _AfterChunk, seconds: float) -> RowUpdate:
    """Add to a row what a chunk of steps gave it, `seconds` after the row began."""
    # The text: what lies between the tokens known so far and the row's end.
    first = len(row.prompt_ids) + len(row.output_ids)
    new_ids = after.tokens[slot, first : after.end[slot]].tolist()
    row.output_ids += new_ids

    # The figures: only steps that emitted something ran for this row.
    steps = after.record.emitted[:, slot] > 0
    accepted = after.record.accepted[steps, slot].tolist()
    row.accepted += accepted
    row.proposed += after.record.proposed[steps, slot].tolist()
    if after.record.copied is not None:
        row.copied += after.record.copied[steps, slot].tolist()
    ranks = after.record.ranks[steps, slot].tolist()
    row.ranks += [path[:count] for path, count in zip(ranks, accepted, strict=True)]
    row.seconds = seconds

    # The end, as the device saw it.
    finish = int(after.finish[slot])
    done = finish not in (RUNNING, EMPTY)
    if done:
        row.finish_reason = "eos" if finish == EOS else "length"
    return RowUpdate(row, new_ids, done)
