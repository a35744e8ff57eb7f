"""A chunk of steps: what the device does between two reads of its results by the host.

On CPU a chunk is one program, a loop over the step. Elsewhere the step is the program and the host
calls it again, one call ahead of the device (`decoding.repeated` says why).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from clover_jax.array_types import Array, Bool, Int
from clover_jax.decoding.commit import StepRecord
from clover_jax.decoding.compiler_options import options_here
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.repeated import loops_on_device
from clover_jax.decoding.scores import MOST_ALTERNATIVES, Scores
from clover_jax.decoding.state import RUNNING, DecodeState
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify
from clover_jax.decoding.tree import CopyTree

QUEUED = 2  # steps: one that runs and one that waits, so that the device never waits for the host

Records = StepRecord | tuple[StepRecord, ...]
# (weights, state, filled, most) -> (state, records)
# filled: [B] which slots hold a row; most: steps to run, None for a whole chunk
Chunk = Callable[..., tuple[DecodeState, Records]]
Carry = tuple[Array, DecodeState, StepRecord]  # steps done, state, records so far


def compile_chunk(config: StepConfig, num_steps: int, placement: Placement) -> Chunk:
    """Return a function that runs `num_steps` steps, or fewer where a row ends.

    It consumes the state. Its records are for `read_records`.
    """

    def compiled(function: Callable) -> Callable:
        # The state is donated, so that its caches are updated in place.
        return placement.compiled(function, donate_argnums=1, compiler_options=options_here())

    def loop(
        weights: Weights, state: DecodeState, filled: Array, most: Array
    ) -> tuple[DecodeState, StepRecord]:
        # Every host reads the records, so each of its devices gets them whole.
        state, records = decode_chunk(config, num_steps, weights, state, filled, most)
        return state, placement.whole(records)

    def step(weights: Weights, state: DecodeState) -> tuple[DecodeState, StepRecord, Array]:
        state, record = speculate_and_verify(config, weights, state)
        # Which rows still run goes out beside the state, which the next call consumes at once.
        return state, *placement.whole((record, state.finish == RUNNING))

    one_step = compiled(step)

    def by_calls(
        weights: Weights, state: DecodeState, filled: np.ndarray, limit: np.int32
    ) -> tuple[DecodeState, tuple[StepRecord, ...]]:
        records: list[StepRecord] = []
        running: list[Array] = []
        # When the host sees that a row has ended, QUEUED - 1 further steps are already called.
        for index in range(limit):
            # Wait for the step called QUEUED calls ago; later calls keep the device busy.
            if index >= QUEUED and (filled & ~np.asarray(running[index - QUEUED])).any():
                break
            state, record, runs = one_step(weights, state)
            records.append(record)
            running.append(runs)
        return state, tuple(records)

    # A loop on CPU, calls elsewhere: see `decoding.repeated`.
    run: Chunk = compiled(loop) if loops_on_device() else by_calls

    def chunk(weights: Weights, state: DecodeState, filled: np.ndarray, most: int | None = None):
        limit = num_steps if most is None else min(most, num_steps)
        # The limit is an argument of the compiled loop, so a new limit compiles nothing.
        return run(weights, state, filled, np.int32(limit))

    return chunk


def decode_chunk(
    config: StepConfig,
    num_steps: int,
    weights: Weights,
    state: DecodeState,
    filled: Bool[Array, " B"],
    most: Int[Array, ""] | int | None = None,
) -> tuple[DecodeState, StepRecord]:
    """Run steps until a row of a filled slot has ended, `num_steps` or `most` of them at most.

    Records have a leading [num_steps]; steps that did not run have emitted nothing.
    """
    most = num_steps if most is None else most

    # A row that ends in a filled slot stops the chunk, so that the slot is refilled. Empty slots
    # never run, and stop nothing.
    def goes_on(done: Array, state: DecodeState) -> Bool[Array, ""]:
        return (done < most) & ((state.finish == RUNNING) | ~filled).all()

    records = _no_records(num_steps, filled.shape[0], config)
    step = functools.partial(speculate_and_verify, config, weights)
    return recorded_steps(step, goes_on, state, records)


def recorded_steps(
    step: Callable[[DecodeState], tuple[DecodeState, StepRecord]],
    goes_on: Callable[[Array, DecodeState], Bool[Array, ""]],
    state: DecodeState,
    records: StepRecord,
) -> tuple[DecodeState, StepRecord]:
    """Run steps while goes_on(steps done, state); write each one's record at its number."""

    def body(carry: Carry) -> Carry:
        done, state, records = carry
        state, record = step(state)
        # A loop's carry has a fixed shape, so each record overwrites its row of zeros.
        records = jax.tree.map(lambda every, one: every.at[done].set(one), records, record)
        return done + 1, state, records

    start: Carry = (jnp.int32(0), state, records)
    return jax.lax.while_loop(lambda carry: goes_on(*carry[:2]), body, start)[1:]


def _no_records(num_steps: int, batch: int, config: StepConfig) -> StepRecord:
    def zeros(*shape: int, dtype: DTypeLike = jnp.int32) -> Array:
        return jnp.zeros((num_steps, batch, *shape), dtype)

    # The shapes of a step's record, written out: `jax.eval_shape` would trace the step once more.
    depth, scores = config.tree.depth, None
    copied = zeros() if isinstance(config.tree, CopyTree) else None
    if config.sampling.scored:
        top = (depth + 1, min(MOST_ALTERNATIVES, config.base.vocab_size))
        float32 = jnp.float32
        scores = Scores(zeros(depth + 1, dtype=float32), zeros(*top), zeros(*top, dtype=float32))
    return StepRecord(zeros(), zeros(), zeros(), zeros(depth), copied, scores)


def read_records(records: Records) -> StepRecord:
    """Bring a chunk's records to the host, with a leading axis of steps."""
    found = jax.device_get(records)
    if isinstance(found, StepRecord):
        return found
    return jax.tree.map(lambda *each: np.stack(each), *found)
