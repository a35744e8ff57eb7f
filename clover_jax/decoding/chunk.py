"""A chunk of steps: what the device does between two looks of the host at the text.

On CPU a chunk is one program, a loop over the step. Elsewhere the step is the program and the host
calls it again, one call ahead of the device (`decoding.repeated` says why).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Bool
from clover_jax.decoding.commit import StepRecord
from clover_jax.decoding.compiler_options import options_here
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.repeated import loops_on_device
from clover_jax.decoding.state import RUNNING, DecodeState
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify

QUEUED = 2  # steps: one that runs and one that waits, so that the device never waits for the host

Records = StepRecord | tuple[StepRecord, ...]
# (weights, state, filled) -> (state, records); filled: [B] which slots hold a row
Chunk = Callable[[Weights, DecodeState, np.ndarray], tuple[DecodeState, Records]]


def compile_chunk(config: StepConfig, num_steps: int, placement: Placement) -> Chunk:
    """Return a function that runs `num_steps` steps, or fewer where a row ends.

    It consumes the state. Its records are for `stack_records`, once they are on the host.
    """

    def compiled(function: Callable) -> Callable:
        return placement.compiled(function, donate_argnums=1, compiler_options=options_here())

    if loops_on_device():
        loop = compiled(functools.partial(decode_chunk, config, num_steps))
        return lambda weights, state, filled: loop(weights, state, placement.array(filled))

    def step(weights: Weights, state: DecodeState) -> tuple[DecodeState, StepRecord]:
        state, record = speculate_and_verify(config, weights, state)
        return state, record.replace(running=placement.whole(record.running))

    return functools.partial(_call_steps, compiled(step), num_steps)


def decode_chunk(
    config: StepConfig,
    num_steps: int,
    weights: Weights,
    state: DecodeState,
    filled: Bool[Array, " B"],
) -> tuple[DecodeState, StepRecord]:
    """Run steps until a row of a filled slot has ended, `num_steps` at most.

    Records have a leading [num_steps]; steps that did not run have emitted nothing.
    """

    def goes_on(carry: tuple[Array, DecodeState, StepRecord]) -> Bool[Array, ""]:
        done, state, _ = carry
        return (done < num_steps) & ((state.finish == RUNNING) | ~filled).all()

    def body(
        carry: tuple[Array, DecodeState, StepRecord],
    ) -> tuple[Array, DecodeState, StepRecord]:
        done, state, records = carry
        state, record = speculate_and_verify(config, weights, state)
        records = jax.tree.map(lambda every, one: every.at[done].set(one), records, record)
        return done + 1, state, records

    records = _no_records(num_steps, filled.shape[0], config.tree.depth)
    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state, records))[1:]


def _no_records(num_steps: int, batch: int, depth: int) -> StepRecord:
    def zeros(*shape: int) -> Array:
        return jnp.zeros((num_steps, batch, *shape), jnp.int32)

    running = jnp.zeros((num_steps, batch), bool)
    return StepRecord(zeros(), zeros(), zeros(), zeros(depth), running)


def _call_steps(
    step: Callable[[Weights, DecodeState], tuple[DecodeState, StepRecord]],
    num_steps: int,
    weights: Weights,
    state: DecodeState,
    filled: np.ndarray,
) -> tuple[DecodeState, tuple[StepRecord, ...]]:
    """Do the same by single steps; when a row is seen to have ended, QUEUED - 1 more have begun."""
    records: list[StepRecord] = []
    for index in range(num_steps):
        if index >= QUEUED:
            running = np.asarray(records[index - QUEUED].running)
            if (filled & ~running).any():
                break
        state, record = step(weights, state)
        records.append(record)
    return state, tuple(records)


def stack_records(records: Records) -> StepRecord:
    """Return a chunk's records, read to the host, with a leading axis of steps."""
    if isinstance(records, StepRecord):
        return records
    return jax.tree.map(lambda *each: np.stack(each), *records)
