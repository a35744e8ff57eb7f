"""The state of a batch between decode steps, and how a slot of it is refilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int
from clover_jax.config import BaseConfig
from clover_jax.decoding.copies import CopyCounts, no_counts
from clover_jax.decoding.sampling import RowSampling, empty_sampling
from clover_jax.decoding.tree_config import CopyTree, Tree
from clover_jax.drafters.drafter import PAD_TOKEN, DraftCache
from clover_jax.drafters.registry import DraftHead
from clover_jax.drafters.text_matches import known_text
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.models.cache import (
    Cache,
    init_base_cache,
    key_values,
    map_key_values,
    with_delta_states,
)
from clover_jax.models.delta_net import DeltaState

RUNNING, EOS, LENGTH, EMPTY = 0, 1, 2, 3  # values of DecodeState.finish
EOS_ROOM = 8  # EOS tokens that a row may have, or as many as the base has if these are more


class DecodeState(struct.PyTreeNode):
    """A batch in the middle of decoding; every leaf has a leading B.

    tokens:   [B, S] prompt and emitted tokens; tokens[b, length[b]] is the root, not yet read.
    length:   [B] positions whose keys and values are committed.
    end:      [B] prompt and emitted tokens; length + 1 while the row runs.
    limit:    [B] `end` at which the row stops.
    eos:      [B, E] tokens that end the row, padded with -1.
    finish:   [B] RUNNING, or why the row stopped.
    cache:    the base's KV cache, per layer [B, K, S, H], or the state of a delta net after
        `length` positions.
    draft_cache: the head's KV cache, other state of the text, or ().
    features: [B, A, F] base features of the positions accepted last, which the head has not
        absorbed yet; the first count[b] are valid.
    next_tokens: [B, A] the token that follows each of them.
    count:    [B] how many of them are valid.
    sampling: each row's key, temperature, top-k, top-p, bias and penalties.
    source:   [B, r] other text to copy from, PAD_TOKEN where there is none; None without room.
    copies: how often copies were right; None for trees without copies.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    end: Int[Array, " B"]
    limit: Int[Array, " B"]
    eos: Int[Array, "B E"]
    finish: Int[Array, " B"]
    cache: Cache
    draft_cache: DraftCache
    features: Float[Array, "B A F"]
    next_tokens: Int[Array, "B A"]
    count: Int[Array, " B"]
    sampling: RowSampling
    source: Int[Array, "B r"] | None = None
    copies: CopyCounts | None = None


class Text(NamedTuple):
    """The fields of a DecodeState that the host reads."""

    tokens: Array
    end: Array
    finish: Array


def empty_state(
    base: BaseConfig,
    head: DraftHead | None,
    tree: Tree,
    batch: int,
    size: int,
    num_eos: int,
    dtype: jnp.dtype,
    source_size: int = 0,
    biased: bool = False,
    penalized: bool = False,
) -> DecodeState:
    """Return `batch` empty slots with room for `size` positions each.

    source_size: tokens of other text that each may bring to copy from.
    biased, penalized: whether rows may change the base's logits, or have penalties.
    """
    accepted = tree.depth + 1
    num_features = len(head.config.features) if head else 0
    draft_cache = head.module.init_cache(batch, size, dtype) if head else ()

    def zeros(*shape: int) -> Array:  # a new buffer each time, so that all can be donated
        return jnp.zeros((batch, *shape), jnp.int32)

    # The batch leads every leaf, so that a slot is one index.
    return DecodeState(
        tokens=zeros(size),
        length=zeros(),
        end=zeros(),
        limit=zeros(),
        eos=zeros(num_eos) - 1,
        finish=zeros() + EMPTY,
        cache=init_base_cache(base, batch, size, dtype),
        draft_cache=draft_cache,
        features=jnp.zeros((batch, accepted, num_features * base.hidden_size), dtype),
        next_tokens=zeros(accepted),
        count=zeros(),
        sampling=empty_sampling(batch, biased, penalized),
        source=zeros(source_size) + PAD_TOKEN if source_size else None,
        copies=no_counts(batch) if isinstance(tree, CopyTree) else None,
    )


def searched(state: DecodeState, end: Int[Array, " B"]) -> Int[Array, "B S"]:
    """Return the text that copies may come from; each row's last token lies at `end`."""
    return known_text(state.tokens, end, state.source)


def insert(state: DecodeState, slot: Int[Array, ""], row: DecodeState) -> DecodeState:
    """Replace one slot with the single row of another state of the same sizes."""
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=0), state, row
    )


def extract(
    state: DecodeState,
    slot: Int[Array, ""],
    beginning: DraftCache,
    delta_states: Sequence[DeltaState] = (),
) -> DecodeState:
    """Return a copy of one slot as a batch of one.

    beginning: the first positions of its draft cache as they were when the row was inserted. After
        a row has ended the step writes garbage there (`step.absorb_last_accepted`).
    delta_states: of an earlier place in the slot's text; the slot has the states after all of it.
    """
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0), state)
    row = row.replace(cache=with_delta_states(row.cache, delta_states))
    first = iter(jax.tree.leaves(key_values(beginning)))

    def restore(x: Array) -> Array:
        return jax.lax.dynamic_update_slice(x, next(first), (0, 0, 0, 0))

    return row.replace(draft_cache=map_key_values(restore, row.draft_cache))


def draft_beginning(row: DecodeState) -> DraftCache:
    """Return the positions that `extract` restores: as many as a step writes."""
    size = row.features.shape[1]
    return map_key_values(lambda x: x[:, :, :size], row.draft_cache)


def clear(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Make one slot empty; its row stops where it is."""
    return state.replace(finish=state.finish.at[slot].set(EMPTY))


def grow(state: DecodeState, size: int) -> DecodeState:
    """Return the state with room for `size` positions; copies every cache once."""

    def pad(x: Array, axis: int) -> Array:
        widths = [(0, size - x.shape[i]) if i == axis else (0, 0) for i in range(x.ndim)]
        return jnp.pad(x, widths)

    # Only these have an axis of positions.
    caches = state.cache, state.draft_cache
    cache, draft_cache = map_key_values(lambda x: pad(x, 2), caches)
    return state.replace(tokens=pad(state.tokens, 1), cache=cache, draft_cache=draft_cache)


def bucket(size: int, longest: int | None = None) -> int:
    """Return the buffer length for `size` positions: a power of two times the cache chunk.

    longest: positions that a buffer needs at most. The last power of two is cut to the quarter that
        holds them: contexts are powers of two, and a tree's depth more would double every cache.

    Example: of 8197 positions at most, 4097 have 8192 and 8193 have 10240, not 16384.
    """
    length = CACHE_CHUNK
    while length < size:
        length *= 2
    quarter = length // 8  # a quarter of the distance from the power of two below
    if longest is None or longest > length or quarter % CACHE_CHUNK:
        return length
    return -(-longest // quarter) * quarter
