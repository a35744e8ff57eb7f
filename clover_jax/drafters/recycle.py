"""Token Recycling: propose what came after a token before. Nothing is trained.

Source: Luo et al., 2024 (arXiv 2408.08696). A row keeps the k tokens that came after each token x,
the one seen last first. Every pair (x, y) that is seen moves y to the front of the list of x:

    of the text          x_t and x_{t+1}, while the prompt is read and as it grows
    of the verification  each slot's token and the base's most probable token after it

Rejected slots count too: what the base says after them costs nothing, and is thrown away otherwise.
The original takes the k most probable tokens of each slot. A greedy step has no logits in memory,
so here it is the first of them, and older ones stay behind it.

There is one table for each row, empty where its prompt begins: a row's text and its accepted
lengths never depend on its neighbors. A table of all rows would know more, and take less memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Int
from clover_jax.config import BaseConfig, DrafterConfig
from clover_jax.drafters.drafter import (
    PAD_TOKEN,
    AcceptedPositions,
    Drafter,
    FewTokens,
    Frozen,
    Ids,
)
from clover_jax.models.placement import over_rows

# How often the token seen last after another follows again, then the one before it, and so on:
# about as on text of the built-in base. Flatter ones make the trees of looping text too shallow.
REPEATS = (0.8, 0.08, 0.04, 0.02, 0.015, 0.01, 0.005, 0.005)
SUCCESSORS = len(REPEATS)  # k


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecycleConfig(DrafterConfig):
    """Token Recycling. num_positions: levels that a search for a tree looks at."""

    # Without weights a draft costs little more than the base's forward, so its tree is deep.
    default_tree: ClassVar[str] = "dynamic:25:20:3"
    kind: str = "recycle"
    features: tuple[str, ...] = ()
    num_positions: int = 16


class Recycle(Drafter):
    """Token Recycling; see the module's docstring. Its cache is the table, [B, k, V].

    The state of W branches is the successors of their last tokens, [B, W, k], PAD_TOKEN for none.
    """

    config: RecycleConfig
    reads_lm_head = False
    observes = True

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Array:
        """Return the table of rows that have seen nothing."""
        # The vocabulary comes last: a TPU pads the last axis to 128.
        return jnp.full((batch, SUCCESSORS, self.config.vocab_size), PAD_TOKEN, jnp.int32)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Array
    ) -> tuple[Int[Array, "B 1 k"], Array]:
        """Learn what followed each token of the text."""
        ahead = jnp.arange(accepted.next_tokens.shape[1])
        index = jnp.minimum(accepted.start[:, None] + ahead, accepted.text.shape[1] - 1)
        tokens = jnp.take_along_axis(accepted.text, index, axis=1)
        valid = ahead < accepted.count[:, None]
        cache = over_rows(remember, cache, tokens, accepted.next_tokens, valid)
        last = jnp.maximum(accepted.count - 1, 0)[:, None]
        root = jnp.take_along_axis(accepted.next_tokens, last, axis=1)
        return _successors(cache, root), cache

    def observe(
        self,
        cache: Array,
        tokens: Int[Array, "B T"],
        choices: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> Array:
        """Learn what the base puts after each slot of a verified tree."""
        return over_rows(remember, cache, tokens, choices, valid)

    def propose(self, frozen: Frozen, state: Int[Array, "B W k"], depth: int) -> FewTokens:
        """Return the successors of each branch's last token."""
        usual = jnp.array([math.log(share) for share in REPEATS])
        known = state != PAD_TOKEN
        return FewTokens(state, jnp.where(known, usual, -jnp.inf))

    def advance(
        self, frozen: Frozen, state: Array, cache: Array, parent: Ids, token: Ids, depth: int
    ) -> Int[Array, "B W k"]:
        """Look up the drafted tokens; what came before them does not matter."""
        return _successors(cache, token)


def remember(
    table: Int[Array, "B k V"],
    tokens: Int[Array, "B n"],
    following: Int[Array, "B n"],
    valid: Bool[Array, "B n"],
) -> Int[Array, "B k V"]:
    """Move each following token to the front of its token's list, as if one after another.

    Pairs that are not valid change nothing. All n are stored at once, and the result is the same
    on every device: no two of them write to one place.

    Example: the list of 5 is 7 8. After the pairs (5, 9) and (5, 8) it is 8 9 7.
    """
    # Which pairs are of one token, [b, n, m], and which of them come later.
    places = jnp.arange(tokens.shape[1])
    same = (tokens[..., None] == tokens[:, None]) & valid[..., None] & valid[:, None]
    later = same & (places > places[:, None])
    again = later & (following[..., None] == following[:, None])
    is_newest = valid & ~again.any(axis=-1)

    # A token's new successors, the last seen first, lie with its last pair.
    size = table.shape[1]
    order = jnp.where(is_newest, (later & is_newest[:, None]).sum(axis=-1), size)
    holder = jnp.where(same, places, -1).max(axis=-1)
    row = jnp.arange(len(table))[:, None]
    new = jnp.full((*tokens.shape, size), PAD_TOKEN)
    new = new.at[row, jnp.where(valid, holder, 0), order].set(following, mode="drop")

    # The old ones come after them, without those that are new.
    old = _successors(table, jnp.where(valid, tokens, PAD_TOKEN))
    repeated = (old[..., None] == new[..., None, :]).any(axis=-1)
    merged = jnp.concatenate([new, jnp.where(repeated, PAD_TOKEN, old)], axis=-1)
    known = merged != PAD_TOKEN
    rank = jnp.cumsum(known, axis=-1) - 1
    is_at = known[..., None] & (rank[..., None] == jnp.arange(size))
    lists = jnp.where(is_at, merged[..., None], PAD_TOKEN).max(axis=-2)

    # Only a token's last pair writes; the others' place is out of range.
    at = jnp.where(valid & (holder == places), tokens, table.shape[2])
    return table.at[row, :, at].set(lists, mode="drop")


def _successors(table: Int[Array, "B k V"], tokens: Int[Array, "B n"]) -> Int[Array, "B n k"]:
    """Return the list of each token; an empty one of PAD_TOKEN."""
    lists = jnp.take_along_axis(table, jnp.maximum(tokens, 0)[:, None], axis=2).swapaxes(1, 2)
    return jnp.where(tokens[..., None] == PAD_TOKEN, PAD_TOKEN, lists)


def make_config(base: BaseConfig) -> RecycleConfig:
    """Return the config for a base."""
    return RecycleConfig(layer=base.head_layer, vocab_size=base.vocab_size)
