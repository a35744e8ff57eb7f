"""The host's side of decoding: continuous batching of requests over compiled programs.

The engine holds the compiled programs; `Slots` decides which to run and when. A slot is refilled as
soon as its row has finished. Nothing recompiles unless a request needs longer buffers than any
before (lengths come in buckets).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.programs import Programs, compile_programs, compile_state_programs
from clover_jax.decoding.requests import (
    Generation,
    Request,
    RowUpdate,
    check_request,
    least_sampling,
)
from clover_jax.decoding.sampling import NO_TOKEN
from clover_jax.decoding.sampling_config import GREEDY, MOST_BIASED, SamplingConfig, check_seed
from clover_jax.decoding.scores import Scores
from clover_jax.decoding.slots import Slots
from clover_jax.decoding.state import EOS_ROOM, DecodeState, Text, bucket
from clover_jax.decoding.step import StepConfig, Weights, weights_for
from clover_jax.decoding.tree import Tree
from clover_jax.drafters.drafter import PAD_TOKEN
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.runtime.compile_clock import CompileClock


class Engine:
    """Decodes streams of requests in a fixed number of slots.

    One engine has the compiled programs of one base, head and tree, which equal engines share;
    weights are passed to each call, so that a head can be decoded while it trains.
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
    ):
        """Prepare the programs; nothing compiles before the first request.

        seed: with a request's index, makes the key of a row whose request has no seed.
        prefill_size: prompt tokens read at once; by default 64 on CPU, else 256.
        source_size: tokens of other text to copy from that a request may bring; more is left out.
        adapts: run every chunk of steps by the cheapest rules of `sampling` that its rows allow,
            one program for each set of rules; otherwise all run by `sampling`.
        mesh: devices to decode on, None for one. Slots are then split over its data and fsdp axes;
            their number is rounded up so that all devices have as many.
        attention: implementation that reads the KV cache, as in `StepConfig`.
        Raises UserError when the tree does not suit the head (see StepConfig).
        """
        # A CPU computes a chunk slowly, so a small one wastes less on short prompts.
        prefill_size = prefill_size or (64 if jax.default_backend() == "cpu" else 256)
        # Buffers are whole cache chunks long: prefill must end exactly where they do.
        if CACHE_CHUNK % prefill_size:
            raise ValueError(f"prefill_size ({prefill_size}) must divide {CACHE_CHUNK}")
        self.config = StepConfig(base, head, tree, sampling, attention)

        # A mesh splits rows over devices, so the batch grows until all have as many.
        self.placement = Placement(mesh)
        self.batch_size = self.placement.whole_rows(batch_size)
        self.max_eos = max(EOS_ROOM, len(base.eos_token_ids))
        check_seed(seed)
        self._seed = seed
        self.prefill_size, self._source_size = prefill_size, source_size

        # Rules of sampling that change no state share the programs of states.
        alike = dataclasses.replace(self.config, sampling=SamplingConfig(biased=sampling.biased))
        self.states = compile_state_programs(alike, source_size, self.max_eos, self.placement)
        self._programs: dict[SamplingConfig, Programs] = {}
        self._steps_per_chunk, self._adapts = steps_per_chunk, adapts

    def stream(
        self, base_params: Params, draft_params: Params, requests: Iterable[Request | None]
    ) -> Generator[RowUpdate]:
        """Decode requests as slots become free; yield every row's tokens as they come.

        requests: the next one is taken whenever a slot is free. None means none for now, as when
            the next turn of a conversation waits for an answer. The stream ends when every row has
            finished and the source is exhausted or gives None.
        """
        with CompileClock() as compiling:  # what is compiled meanwhile is no row's time
            slots = self.open(base_params, draft_params, compiling)
            rows: dict[int, Generation] = {}
            source = iter(requests)
            while True:
                # Fill every free slot before the next steps; a source without a request may have
                # one later.
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

    def open(
        self,
        base_params: Params,
        draft_params: Params | None,
        compiling: CompileClock,
        size: int | None = None,
    ) -> Slots:
        """Return empty slots for these weights; the other arguments are those of `Slots`."""
        weights = self.placement.weights(weights_for(self.config.head, base_params, draft_params))
        return Slots(self, weights, compiling, size)

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
        """Raise UserError for a request that cannot be decoded by this base."""
        check_request(request, self.config.base, self.config.sampling, self.max_eos)
        if request.is_scored and not self._adapts:
            raise UserError("log-probabilities need an engine that adapts to its rows")

    def programs(self, requests: Iterable[Request]) -> Programs:
        """Return the compiled functions that decode these requests in one batch."""
        sampling = self.config.sampling
        if self._adapts:
            sampling = least_sampling(sampling, requests)
        if sampling not in self._programs:
            config = dataclasses.replace(self.config, sampling=sampling)
            programs = compile_programs(
                config, self.prefill_size, self._steps_per_chunk, self.placement
            )
            # Only the states of this engine have room for biases then.
            if self.config.sampling.biased and not sampling.biased:
                programs = programs.without_bias()
            self._programs[sampling] = programs
        return self._programs[sampling]

    def read_prompt(
        self, weights: Weights, row: DecodeState, request: Request, start: int
    ) -> tuple[DecodeState, Scores | None]:
        """Read a chunk of a request's prompt from position `start` on; consumes the row."""
        return self.programs([request]).prefill(weights, row, np.int32(start))

    def room_for(
        self, state: DecodeState | None, request: Request, weights: Weights
    ) -> DecodeState:
        """Return the state with buffers long enough for the request; without one make it."""
        size = self.buffer_size(self._limit(request))
        if state is None:
            return self.empty_state(size, weights)
        return self.states.grow(state, size) if size > state.tokens.shape[1] else state

    def empty_state(self, size: int, weights: Weights) -> DecodeState:
        """Return empty slots with buffers of `size` positions."""
        return self.states.empty(self.batch_size, size, weights.base["embedding"].dtype)

    def row_state(
        self, request: Request, batch: DecodeState, begun: DecodeState | None = None
    ) -> DecodeState:
        """Return a batch of one for a request, none of its prompt read.

        batch: the state that it will be inserted into. begun: a row whose caches it starts from.
        """
        size = batch.tokens.shape[1]
        if size < self._limit(request) + self.config.tree.depth:
            # dynamic_update_slice would clamp, and overwrite live positions.
            raise ValueError(f"{size} positions are too few for {request}")

        # The prompt and its EOS ids are padded to fixed shapes, so that nothing recompiles.
        prompt = np.zeros((1, size), np.int32)
        length = len(request.prompt_ids)
        prompt[0, :length] = request.prompt_ids
        eos = np.full((1, self.max_eos), -1, np.int32)
        eos[0, : len(request.eos_ids)] = request.eos_ids

        # Prefill fills its caches chunk by chunk. One program makes all arrays: to make them one by
        # one took longer than to read the prompt of a small base.
        fields = {
            "tokens": prompt,
            "end": np.array([length], np.int32),
            "limit": np.array([self._limit(request)], np.int32),
            "eos": eos,
            "source": self._source(request),
        }
        dtype, settings = batch.cache[0].key.dtype, self._row_settings(request)
        row = self.states.begin(size, dtype, fields, settings, *self._row_key(request))
        if begun is not None:
            row = row.replace(cache=begun.cache, draft_cache=begun.draft_cache)
        return row

    def text(self, state: DecodeState) -> Text:
        """Return what the host reads of a state, in copies."""
        return self.placement.copies(Text(state.tokens, state.end, state.finish))

    def _limit(self, request: Request) -> int:
        context = self.config.base.max_position_embeddings
        return min(len(request.prompt_ids) + request.max_new_tokens, context)

    def _source(self, request: Request) -> np.ndarray | None:
        """Return what a request brought to copy from, each text begun by a PAD_TOKEN."""
        if not self._source_size:
            return None
        joined = [id_ for ids in request.sources for id_ in (PAD_TOKEN, *ids)]
        source = np.full((1, self._source_size), PAD_TOKEN, np.int32)
        source[0, : len(joined)] = joined[: self._source_size]
        return source

    def _row_settings(self, request: Request) -> dict[str, Any]:
        """Return the fields of a row's RowSampling but its key."""
        bias = {"bias": self._row_bias(request)} if self.config.sampling.biased else {}
        return bias | {
            "temperature": np.array([request.temperature], np.float32),
            "top_k": np.array([min(request.top_k, self.config.base.vocab_size)], np.int32),
            "top_p": np.array([request.top_p], np.float32),
        }

    def _row_key(self, request: Request) -> tuple[np.uint32, np.ndarray]:
        """Return the arguments of `row_key`."""
        # A row without a seed still draws the same text in any batch: its index stands for it. A
        # later turn may draw at positions of an earlier one.
        index = request.index if request.seed is None else -1
        seed = self._seed if request.seed is None else request.seed
        return np.uint32(seed), np.array([index, request.turn or -1], np.int32)

    def _row_bias(self, request: Request) -> tuple[np.ndarray, ...]:
        """Return the fields of a row's RowBias."""
        ids = np.full((1, MOST_BIASED), NO_TOKEN, np.int32)
        values = np.zeros((1, MOST_BIASED), np.float32)
        for index, (id_, value) in enumerate(request.logit_bias):
            ids[0, index], values[0, index] = id_, value
        # No token stands beyond the limit.
        eos_from = min(len(request.prompt_ids) + request.min_new_tokens, self._limit(request))
        return ids, values, np.array([eos_from], np.int32)
