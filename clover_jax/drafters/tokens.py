"""Token embeddings of draft heads, and shifting along the text for teacher forcing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Float, Int
from clover_jax.config import DrafterConfig
from clover_jax.drafters.drafter import Frozen
from clover_jax.models.decoder import scale_rows
from clover_jax.models.int8 import take_rows, widen
from clover_jax.models.placement import by_rows


def embed(frozen: Frozen, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Return the tokens' rows of lm_head, the token embedding of the Clover heads."""
    # Rows of lm_head, not of the embedding: the paper's heads read the matrix that they propose
    # with.
    return by_rows(widen(take_rows(frozen.lm_head, tokens), frozen.embedding.dtype))


def embed_input(
    config: DrafterConfig, frozen: Frozen, tokens: Int[Array, "*b"]
) -> Float[Array, "*b D"]:
    """Return the tokens' rows of the base's input embedding, as its first layer reads them."""
    rows = by_rows(jnp.take(frozen.embedding, tokens, axis=0, mode="clip"))
    return scale_rows(rows, config.embedding_scale)


def shift_left(tokens: Int[Array, "B S"], by: int) -> Int[Array, "B S"]:
    """Shift so that slot t holds x_{t+by}, with 0 beyond the end.

    Example: [[5, 6, 7]] shifted by 1 is [[6, 7, 0]].
    """
    return jnp.pad(tokens[:, by:], ((0, 0), (0, min(by, tokens.shape[1]))))


def extend(tokens: Int[Array, "B S"], by: int) -> Int[Array, "B S+by"]:
    """Append `by` zeros to each row, for `window` to reach beyond the end."""
    return jnp.pad(tokens, ((0, 0), (0, by)))


def window(x: Array, start: int, size: int) -> Array:
    """Return [B, size, ...], slot t holding x[:, t + start].

    What is computed from extended tokens, once for each, is so shifted along the text:
    `window(f(extend(tokens, by)), by, S)` equals `f(shift_left(tokens, by))`.
    """
    return x[:, start : start + size]


def to_draft(config: DrafterConfig, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return tokens in the head's own vocabulary, -1 where it lacks them.

    Example: with draft_to_target (2, 5), [5, 3, 2] is [1, -1, 0].
    """
    if config.draft_to_target is None:
        return tokens
    # A constant of the program, made by NumPy: the ids are static. PAD_TOKEN reads the last entry.
    inverse = np.full(config.vocab_size + 1, -1, np.int32)
    inverse[list(config.draft_to_target)] = np.arange(config.draft_vocab_size)
    return jnp.asarray(inverse)[tokens]
