"""Decode states for timing or compiling a step: rows in the middle of their text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clover_jax.decoding.models import Models
from clover_jax.decoding.state import EOS_ROOM, RUNNING, DecodeState, bucket, empty_state
from clover_jax.errors import UserError

MOST_CONTEXT = 1024  # the default


def fitting_context(models: Models, room: int) -> int:
    """Return the default number of committed positions of a measurement, at most MOST_CONTEXT.

    Example: 112 for a base of 1024 positions where the room is 912.
    """
    # At least 1: if even that does not fit, `cache_size` raises the error.
    return max(1, min(MOST_CONTEXT, models.base.config.max_position_embeddings - room))


def cache_size(models: Models, context: int, room: int) -> int:
    """Return the buffer length for `context` committed positions and `room` more.

    room: positions that a measurement advances by, 0 where it stays in place.
    Raises UserError where the base's context is shorter.
    """
    longest = models.base.config.max_position_embeddings
    if context + room > longest:
        needed = f" and the {room} positions that --rounds takes need" if room else " needs"
        fewer = " or --rounds" if room else ""
        raise UserError(
            f"--context={context}{needed} more than {longest}, the base's context; give a smaller "
            f"--context{fewer}"
        )
    depth = models.tree.depth
    return bucket(context + room + depth, longest + depth)  # as in an engine


def state_shapes(models: Models, batch: int, size: int) -> DecodeState:
    """Return a decode state as ShapeDtypeStructs."""
    return jax.eval_shape(lambda: _empty(models, batch, size))


def running_state(models: Models, batch: int, size: int, context: int) -> DecodeState:
    """Return a state whose rows have `context` committed positions and run without end.

    KV caches are zero, since their values do not change the cost. Tokens and features are random,
    and the largest number of accepted positions waits for `absorb`.
    """
    # One program makes all buffers; without jit each would compile a program of its own.
    state = jax.jit(lambda: _empty(models, batch, size))()
    tokens, features = jax.random.split(jax.random.key(2))
    vocabulary, pending = models.base.config.vocab_size, state.next_tokens.shape[1]
    full = jnp.full((batch,), context, jnp.int32)
    # No row reaches the limit: a row that ends would cost less than one that runs.
    return state.replace(
        tokens=jax.random.randint(tokens, (batch, size), 0, vocabulary, jnp.int32),
        length=full,
        end=full + 1,
        limit=full + size,
        finish=jnp.full((batch,), RUNNING, jnp.int32),
        features=jax.random.normal(features, state.features.shape, models.dtype),
        next_tokens=jax.random.randint(tokens, state.next_tokens.shape, 0, vocabulary, jnp.int32),
        count=jnp.full((batch,), pending, jnp.int32),
    )


def _empty(models: Models, batch: int, size: int) -> DecodeState:
    # EOS_ROOM, as in an engine, makes shapes and programs the engine's.
    base, head, tree = models.base.config, models.head, models.tree
    return empty_state(base, head, tree, batch, size, EOS_ROOM, models.dtype)
