"""Prompt lookup: propose what followed the last tokens earlier in the row. Nothing is trained.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), here with several
continuations, so that a tree has something to branch on. With m_j as in `text_matches`:

    candidates      tokens x_j after the longest matches, the newest among equals, all different
    P(k-th)         r(m) of what the candidates before it have left

r is how often what followed a match of that length follows again. A branch is its last tokens: a
drafted token makes another suffix, which is looked up in the text again.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Int
from clover_jax.config import BaseConfig, DrafterConfig
from clover_jax.drafters.drafter import AcceptedPositions, Drafter, FewTokens, Frozen, Ids
from clover_jax.drafters.text_matches import find_matches, last_tokens
from clover_jax.models.cache import Cache

CONTINUATIONS = 4  # different next tokens of a branch
# How often what followed a match of 0, 1 .. 8 tokens follows again.
REPEATS = (0.0, 0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.8, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupConfig(DrafterConfig):
    """Prompt lookup. num_positions: levels that a search for a tree looks at."""

    # Without weights a draft costs little more than the base's forward, so its tree is large.
    default_tree: ClassVar[str] = "copy:25"
    kind: str = "lookup"
    features: tuple[str, ...] = ()
    num_positions: int = 16


class LookupState(struct.PyTreeNode):
    """The possible continuations of a text.

    suffix: [B, W, l] last tokens of each branch, newest first.
    text:   [B, S] what is searched, the same for all branches.
    end:    [B] where the row's own text ends.
    """

    suffix: Int[Array, "B W l"]
    text: Int[Array, "B S"]
    end: Int[Array, " B"]


class Lookup(Drafter):
    """Prompt lookup; see the module's docstring. It has no cache: the decode state has the text."""

    config: LookupConfig
    reads_lm_head = False

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[LookupState, Cache]:
        end = accepted.start + accepted.count
        suffix = last_tokens(accepted.text, end)[:, None]
        return LookupState(suffix, accepted.text, end), cache

    def propose(self, frozen: Frozen, state: LookupState, depth: int) -> FewTokens:
        """Return what followed the longest matches of each branch."""
        matches = find_matches(state.text, state.end, state.suffix, CONTINUATIONS)
        repeats = jnp.asarray(REPEATS)[matches.length]
        # A candidate counts where all before it are wrong: the product of their 1 - repeats.
        # Dividing takes its own factor out again; that is never 0, as all REPEATS are below 1.
        left = jnp.cumprod(1 - repeats, axis=-1) / (1 - repeats)
        return FewTokens(matches.token, jnp.log(repeats * left))

    def advance(
        self, frozen: Frozen, state: LookupState, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> LookupState:
        """Put the drafted tokens at the ends of their branches."""
        above = jnp.take_along_axis(state.suffix, parent[..., None], axis=1)
        # Newest first: the drafted token enters in front, and the oldest leaves.
        suffix = jnp.concatenate([token[..., None], above[..., :-1]], axis=-1)
        return state.replace(suffix=suffix)


def make_config(base: BaseConfig) -> LookupConfig:
    """Return the config for a base."""
    return LookupConfig(layer=base.head_layer, vocab_size=base.vocab_size)
