"""Chunked prefill: read a prompt into the KV caches in chunks and emit the first token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Int
from clover_jax.decoding.accept import keep_rows
from clover_jax.decoding.emission import cut, write_tokens
from clover_jax.decoding.sampling import Scores, add_bias, draw, mask_out, penalize, score, warp
from clover_jax.decoding.state import EMPTY, DecodeState, searched
from clover_jax.decoding.step import StepConfig, Weights, absorb_positions, tree_features
from clover_jax.drafters.drafter import AcceptedPositions
from clover_jax.models.cache import ordered_after, write_rows
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from clover_jax.models.placement import gathered_in_use
from clover_jax.models.top_k import argmax


def prefill_chunk(
    config: StepConfig,
    size: int,
    weights: Weights,
    state: DecodeState,
    start: Int[Array, ""],
    allowed: Int[Array, "B 1 w"] | None = None,
) -> tuple[DecodeState, Scores | None]:
    """Read positions start .. start + size - 1 of every row's prompt.

    state: tokens hold the prompts and `end` their lengths; `length` grows to `end` over the
        chunks. The row whose last prompt token lies in this chunk emits its first token. Rows of
        other lengths share a chunk: positions past a row's prompt are garbage, overwritten later.
    allowed: the tokens that the first token may be, as in `sampling.mask_out`; None for all.
    Returns the state and, where `config.sampling.scored`, the scores of the tokens after each
    position, [B, size]: of the prompt and of the first token emitted.
    """
    weights, batch = gathered_in_use(weights), state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, size, axis=1)
    starts = jnp.broadcast_to(start, (batch,))
    positions = starts[:, None] + jnp.arange(size)

    # Read this chunk of every row's prompt.
    committed, mask = config.committed(state.cache), causal_mask(batch, size)
    output: Any = Decoder(config.base).apply(
        {"params": weights.base}, tokens, positions, mask, committed, starts
    )
    features, post_norm = tree_features(config, output.hidden), output.hidden["post_norm"]
    # The write waits for the read, or XLA would keep a copy of the cache.
    write_at = ordered_after(starts, post_norm)
    # A state moves past the prompt's own tokens only, and not once its row has its first token.
    count = jnp.where(state.finish == EMPTY, jnp.clip(state.end - starts, 0, size), 0)
    count = ordered_after(count, post_norm)
    state = state.replace(cache=write_rows(state.cache, output.fresh, write_at, count))
    if config.head is not None:
        state = absorb_prompt(config, weights, state, features, start)
    state = _emit_first(config, weights, state, post_norm, features, start, allowed)
    if not config.sampling.scored:
        return state, None
    logits = base_logits(config.base, weights.base, post_norm)
    return state, score(logits, _tokens_after(state, start, size), state.sampling)


def _tokens_after(state: DecodeState, start: Array, size: int) -> Int[Array, "B size"]:
    """Return the token after each of `size` positions; the last one's lies in the next chunk."""
    padded = jnp.pad(state.tokens, ((0, 0), (0, 1)))
    return jax.lax.dynamic_slice_in_dim(padded, start + 1, size, axis=1)


def absorb_prompt(
    config: StepConfig, weights: Weights, state: DecodeState, features: Array, start: Array
) -> DecodeState:
    """Update the draft cache with a chunk of the prompts and the base's features there.

    All positions but a prompt's last, whose next token is not known yet.
    """
    size = features.shape[1]
    next_tokens = _tokens_after(state, start, size)
    starts = jnp.broadcast_to(start, state.end.shape)
    count = jnp.clip(state.end - 1 - start, 0, size)
    text = searched(state, starts + count)
    accepted = AcceptedPositions(features, next_tokens, starts, count, text)
    _, draft_cache = absorb_positions(config, weights, accepted, state.draft_cache)
    return state.replace(draft_cache=draft_cache)


def _emit_first(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    post_norm: Array,
    features: Array,
    start: Array,
    allowed: Array | None,
) -> DecodeState:
    """Emit the base's token after the last prompt position where that lies in this chunk."""
    size = features.shape[1]
    last = state.end - 1 - start  # index of the last prompt position within the chunk
    here = (last >= 0) & (last < size) & (state.finish == EMPTY)
    index = jnp.clip(last, 0, size - 1)[:, None, None]

    def choose() -> Int[Array, "B 1"]:
        at_last = jnp.take_along_axis(post_norm, index, axis=1)
        logits = base_logits(config.base, weights.base, at_last)
        if config.sampling.biased:
            logits = add_bias(logits, state.sampling, state.eos, state.end[:, None])
        if config.sampling.penalized:
            logits = penalize(logits, state.sampling, state.tokens, state.end)
        if allowed is not None:
            logits = mask_out(logits, allowed)
        if config.sampling.verify == "greedy":
            return argmax(logits)
        warped = warp(logits, state.sampling, config.sampling.truncate)
        return draw(warped[:, 0], state.sampling, state.end)[:, None]

    # Only a prompt's last chunk needs a token: the others skip lm_head, and top-p's sort.
    first = jax.lax.cond(here.any(), choose, lambda: jnp.zeros_like(state.end)[:, None])
    emission = cut(first, jnp.ones_like(state.end), state.limit - state.end, state.eos)

    # The new token becomes the root; its features wait for the head.
    pending = jnp.pad(
        jnp.take_along_axis(features, index, axis=1),
        ((0, 0), (0, state.features.shape[1] - 1), (0, 0)),
    )
    emitted = {
        "tokens": write_tokens(state.tokens, first, state.end),
        "length": state.end,
        "end": state.end + 1,
        "finish": emission.finish,
        "features": pending.astype(state.features.dtype),
        "next_tokens": jnp.broadcast_to(first, state.next_tokens.shape),
        "count": jnp.ones_like(state.count),
    }
    # Other rows stay as they are; their caches have the chunk already.
    kept = {name: keep_rows(here, new, getattr(state, name)) for name, new in emitted.items()}
    return state.replace(**kept)
