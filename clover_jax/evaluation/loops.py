"""Run parts of a step as the engine runs them: in a loop on the device, or each by itself.

On CPU the engine's chunk is a loop on the device, so a part is timed in such a loop; starting it
from the host could take longer than the part. Each iteration uses the result of the last, so the
compiler cannot hoist the part out of the loop. On other devices a program runs its part once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Int
from clover_jax.decoding.programs import decode_chunk, loops_on_device
from clover_jax.decoding.sampling_config import GREEDY
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import (
    StepConfig,
    Weights,
    absorb_and_draft,
    roots,
    speculate_and_verify,
    verify_tree,
)
from clover_jax.decoding.tree import TokenTree

STEPS = 8  # as in the engine's chunks


def steps_at_once() -> int:
    """Return the number of steps that a program below runs on this platform."""
    return STEPS if loops_on_device() else 1


def step_loop(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, Int[Array, ""]]:
    """Run whole steps, in which no row may end."""
    if not loops_on_device():
        state, record = speculate_and_verify(config, weights, state)
        return state, record.emitted.sum()

    # Every slot holds a row, or the chunk would end at once.
    filled = jnp.ones_like(state.finish, bool)
    state, records = decode_chunk(config, STEPS, weights, state, filled)
    return state, records.emitted.sum()


def draft_loop(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Absorb and draft, with the token drafted last as the next root.

    Each draft depends on the previous one. Otherwise the compiler would compute a head that reads
    no token (Medusa), and copies of the text, once before the loop, and of other heads only the
    levels that lead to the next root.
    """

    def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, root = carry
        state, drafted = absorb_and_draft(config, weights, state, root)
        tokens = drafted.tree.tokens

        # Token ids are 0 or more, so this adds 0, but the compiler cannot know.
        zero = jnp.minimum(tokens.max(axis=1), 0)
        state = state.replace(
            features=state.features + zero[:, None, None].astype(state.features.dtype),
            next_tokens=state.next_tokens + zero[:, None],
            length=state.length + zero,
        )
        # A slot without a token holds -1, which is not a valid id.
        return state, jnp.maximum(tokens[:, -1], 0) + zero

    return _repeat(body, (state, roots(state)))


def verify_loop(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree
) -> Int[Array, "B T"]:
    """Verify a tree; each iteration fills its slots with the base's choices of the last one."""
    # Sampling is not a part of verification, and greedy choices need no random keys.
    config = dataclasses.replace(config, sampling=GREEDY)

    def body(tokens: Array) -> Array:
        return verify_tree(config, weights, state, tree.replace(tokens=tokens)).predicted

    return _repeat(body, tree.tokens)


def _repeat(body: Callable[[Any], Any], carry: Any) -> Any:
    if not loops_on_device():
        return body(carry)
    return jax.lax.scan(lambda carry, _: (body(carry), None), carry, length=STEPS)[0]
