"""Training on tokens that a head drafts itself, in the place of some of the text's."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int

CHUNK = 512  # positions whose logits exist at a time


def most_probable_tokens(
    logits: Callable[[Array], Array],
    hidden: Float[Array, "B S e"],
    draft_to_target: tuple[int, ...] | None,
) -> Int[Array, "B S"]:
    """Return the most probable token of each position, few positions' logits at a time.

    logits: maps [B, c, e] to [B, c, Vd]; no gradient flows through it.
    draft_to_target: the target's ids of a reduced vocabulary.
    """
    rows, size, width = hidden.shape
    chunk = max(CHUNK // rows, 1)
    padded = jnp.pad(hidden, ((0, 0), (0, -size % chunk), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(rows, -1, chunk, width), 1, 0)

    def best(hidden: Float[Array, "B c e"]) -> Int[Array, "B c"]:
        return logits(jax.lax.stop_gradient(hidden)).argmax(axis=-1)

    found = jnp.moveaxis(jax.lax.map(best, chunks), 0, 1).reshape(rows, -1)[:, :size]
    return found if draft_to_target is None else jnp.asarray(draft_to_target)[found]


def some_replaced(
    key: Array, share: Array | float, text: Float[Array, "B S r"], by: Float[Array, "B S r"]
) -> Float[Array, "B S r"]:
    """Return `text` with a share of its positions, drawn at random, replaced."""
    is_replaced = jax.random.bernoulli(key, share, text.shape[:2])
    return jnp.where(is_replaced[..., None], by, text)
