"""Clover-2's optional `label_mask`: leave out what the base itself would have rejected before.

A_s holds those of the base's 8 most probable tokens at s whose preceding cumulative probability is
at most 0.8. The pair (t, i) counts only when x_{t+1+j} lies in A_{t+j} for every j = 0 .. i: had
the base been unlikely to go that way, verification would have stopped there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.models.decoder import project

CANDIDATES = 8
PRECEDING_MASS = 0.8


def likely_next(
    lm_head: Float[Array, "V D"],
    states: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    chunk: int,
    groups: int = 1,
) -> Bool[Array, "B S"]:
    """Return [b, s] True where x_{s+1} lies in A_s; what the last column says means nothing.

    states: the base's g. chunk: positions of a group whose logits exist at a time. groups: of
        rows, side by side as in the loss, so that each device of a mesh looks at its own.
    """
    following = jnp.roll(tokens, -1, axis=1)

    def one(position: tuple[Array, Array]) -> Array:
        state, token = position
        return among_likely(project(lm_head, state), token)

    def of_group(positions: tuple[Array, Array]) -> Array:
        return jax.lax.map(one, positions, batch_size=chunk)

    flat = (states.reshape(groups, -1, states.shape[-1]), following.reshape(groups, -1))
    return jax.vmap(of_group)(flat).reshape(tokens.shape)


def among_likely(logits: Float[Array, " V"], token: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether a token is one of A, for the logits of one position.

    Example: probabilities .5, .4, .1 give A = {0, 1}: before token 2 lies a mass of .9.
    """
    ids = jnp.arange(logits.shape[-1])
    # By sums over the vocabulary: on a mesh `lax.top_k` gathers the logits of all rows.
    own = jnp.where(ids == token, logits, 0).sum()
    before = (logits > own) | ((logits == own) & (ids < token))
    preceding = jnp.where(before, jax.nn.softmax(logits), 0).sum()
    return (before.sum() < CANDIDATES) & (preceding <= PRECEDING_MASS)
