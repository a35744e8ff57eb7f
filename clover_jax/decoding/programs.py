"""The compiled programs of an engine; equal engines share them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from clover_jax.array_types import Array
from clover_jax.decoding.chunk import Chunk, compile_chunk
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.prefill import prefill_chunk
from clover_jax.decoding.sampling import RowBias, row_key
from clover_jax.decoding.scores import Scores
from clover_jax.decoding.state import (
    DecodeState,
    clear,
    draft_beginning,
    empty_state,
    extract,
    grow,
    insert,
)
from clover_jax.decoding.step import StepConfig, Weights

MOST_KEPT = 32  # cached sets of programs: an engine equal to an earlier one traces nothing


class Programs(NamedTuple):
    """The compiled programs of one set of sampling rules.

    prefill: (weights, row, start) -> (row, scores), for a batch of one; it consumes the row.
    decode: a chunk of steps.
    """

    prefill: Callable[[Weights, DecodeState, np.int32], tuple[DecodeState, Scores | None]]
    decode: Chunk

    def without_bias(self) -> Programs:
        """Return these programs, of states that have no biases, for states that have."""
        return Programs(_without_bias(self.prefill), _without_bias(self.decode))


class StatePrograms(NamedTuple):
    """Programs that make states and move rows between them; most are of `decoding.state`.

    empty: (batch, size, dtype) -> empty slots.
    begin: (size, dtype, fields, settings, seed, numbers) -> a batch of one. fields: of its
        DecodeState; settings: of its RowSampling, a bias as the fields of its RowBias. The key is
        `row_key`'s.
    """

    empty: Callable[..., DecodeState]
    begin: Callable[..., DecodeState]
    insert: Callable[..., DecodeState]
    clear: Callable[..., DecodeState]
    extract: Callable[..., DecodeState]
    grow: Callable[..., DecodeState]
    draft_beginning: Callable


@functools.lru_cache(maxsize=MOST_KEPT)
def compile_programs(
    config: StepConfig, prefill_size: int, num_steps: int, placement: Placement
) -> Programs:
    """Return the programs that read prompts and decode; they compile when they are called."""

    def prefill(
        weights: Weights, row: DecodeState, start: Array
    ) -> tuple[DecodeState, Scores | None]:
        row, scores = prefill_chunk(config, prefill_size, weights, row, start)
        return row, placement.whole(scores)

    return Programs(
        placement.compiled(prefill, donate_argnums=1), compile_chunk(config, num_steps, placement)
    )


@functools.lru_cache(maxsize=MOST_KEPT)
def compile_state_programs(
    config: StepConfig, source_size: int, num_eos: int, placement: Placement
) -> StatePrograms:
    """Return the programs of an engine's states; they compile when they are called."""

    def empty(batch: int, size: int, dtype: np.dtype) -> DecodeState:
        return empty_state(
            config.base,
            config.head,
            config.tree,
            batch,
            size,
            num_eos,
            dtype,
            source_size=source_size,
            biased=config.sampling.biased,
        )

    def begin(
        size: int, dtype: np.dtype, fields: dict[str, Any], settings: dict[str, Any], *key: Array
    ) -> DecodeState:
        row = empty(1, size, dtype)
        bias = RowBias(*settings.pop("bias")) if config.sampling.biased else None
        rules = row.sampling.replace(key=row_key(*key), bias=bias, **settings)
        return row.replace(sampling=rules, **fields)

    # States are donated, so that every program updates caches in place.
    compiled = placement.compiled
    return StatePrograms(
        empty=compiled(empty, static_argnums=(0, 1, 2)),
        begin=compiled(begin, static_argnums=(0, 1)),
        insert=compiled(insert, donate_argnums=0),
        clear=compiled(clear, donate_argnums=0),
        extract=compiled(extract),
        grow=compiled(grow, static_argnums=1),
        draft_beginning=jax.jit(draft_beginning),
    )


def _without_bias(program: Callable) -> Callable:
    """Return a program of states that have no biases, for one of states that have."""

    def call(weights: Weights, state: DecodeState, *arguments: Any) -> tuple[DecodeState, Any]:
        bias = state.sampling.bias
        state = state.replace(sampling=state.sampling.replace(bias=None))
        state, result = program(weights, state, *arguments)
        return state.replace(sampling=state.sampling.replace(bias=bias)), result

    return call
