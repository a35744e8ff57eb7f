"""Parts of a step in a loop on the device, each time on the result of the last.

So neither starting a part from the host nor the compiler's hoisting falsifies its time. In the
engine a chunk of steps is started once; where a step takes a millisecond, starting each part by
itself would cost more than the part.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Int
from clover_jax.decoding.sampling import GREEDY
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import StepConfig, Weights, absorb_and_draft, roots, verify_tree
from clover_jax.decoding.tree import TokenTree

STEPS = 8  # as in the engine's chunks


def draft_loop(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Absorb and draft STEPS times, under the token drafted last."""

    def body(carry, _):
        state, root = carry
        state, drafted = absorb_and_draft(config, weights, state, root)
        return (state, jnp.maximum(drafted.tree.tokens[:, -1], 0)), None

    (state, last), _ = jax.lax.scan(body, (state, roots(state)), length=STEPS)
    return state, last


def verify_loop(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree
) -> Int[Array, "B T"]:
    """Verify a tree STEPS times, its slots filled with what the base found most probable."""
    config = dataclasses.replace(config, sampling=GREEDY)

    def body(tokens, _):
        return verify_tree(config, weights, state, tree.replace(tokens=tokens)).choices, None

    return jax.lax.scan(body, tree.tokens, length=STEPS)[0]
