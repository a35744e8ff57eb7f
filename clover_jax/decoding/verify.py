"""The verify stage (one base forward over the tree) and the accept stage (walk down a path)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.top_k import argmax
from clover_jax.decoding.tree import TokenTree, ancestor_mask, node_depth
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.cache import Cache
from clover_jax.models.decoder import Decoder, DecoderOutput, project


@struct.dataclass
class Accepted:
    """The accepted path of each row.

    path:  [B, A] slots from the root down; the first count + 1 are valid, the others are 0.
    count: [B] accepted drafted tokens.
    bonus: [B] the base's own token after the last accepted node.
    """

    path: Int[Array, "B A"]
    count: Int[Array, " B"]
    bonus: Int[Array, " B"]


def verify(
    config: BaseConfig,
    params: Params,
    tree: TokenTree,
    depth: int,
    cache: Cache,
    length: Int[Array, " B"],
) -> DecoderOutput:
    """Run the base once over all slots of each row's tree, each seeing its ancestors only."""
    mask = ancestor_mask(tree.parent, depth)
    positions = length[:, None] + node_depth(mask)
    return Decoder(config).apply({"params": params}, tree.tokens, positions, mask, cache, length)


def greedy_tokens(params: Params, output: DecoderOutput) -> Int[Array, "B T"]:
    """Return the base's most probable next token at every slot."""
    logits = project(frozen_from_base(params).lm_head, output.hidden["post_norm"])
    return argmax(logits)


def accept_greedy(tree: TokenTree, best: Int[Array, "B T"], depth: int) -> Accepted:
    """Accept the longest root path whose every token is the base's argmax at its parent.

    Siblings carry different tokens, so at most one path qualifies.

    Example: tokens [[5, 7, 8, 9]], parent [[-1, 0, 1, 0]] and best [[7, 8, 4, 0]] accept slots
    0, 1, 2 with bonus 4.
    """
    mask = ancestor_mask(tree.parent, depth)
    expected = jnp.take_along_axis(best, jnp.maximum(tree.parent, 0), axis=1)
    agrees = (tree.tokens == expected) | (tree.parent < 0)
    kept = jnp.all(agrees[:, None, :] | ~mask, axis=-1)
    level = jnp.where(kept, node_depth(mask), -1)
    at_depth = level[:, None, :] == jnp.arange(depth + 1)[:, None]  # [B, A, T]
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    count = level.max(axis=-1)
    last = jnp.take_along_axis(path, count[:, None], axis=1)
    return Accepted(path, count, jnp.take_along_axis(best, last, axis=1)[:, 0])
