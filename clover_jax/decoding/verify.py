"""The verify stage: one base forward over all slots of every row's tree (tree attention)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.tree import TokenTree, node_depth
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.cache import Cache
from clover_jax.models.decoder import Decoder, DecoderOutput, project
from clover_jax.models.int8 import Int8Matrix, Matrix
from clover_jax.sharding.top_k import argmax

MOST_LOGITS = 2**23  # logits that a GPU holds at a time: 32 MiB, which its cache can keep


def verify(
    config: BaseConfig,
    params: Params,
    tree: TokenTree,
    cache: Cache,
    length: Int[Array, " B"],
) -> DecoderOutput:
    """Run the base over each row's tree after length[b] positions, each slot seeing its ancestors.

    A slot's position is length + its level.
    """
    # Siblings share a position: the mask alone keeps branches apart.
    mask = tree.mask()
    positions = length[:, None] + node_depth(mask)
    output: Any = Decoder(config).apply(
        {"params": params}, tree.tokens, positions, mask, cache, length
    )
    # Without the barrier XLA keeps each layer's whole product with qkv until the commit.
    hold = jax.lax.optimization_barrier
    fresh = jax.lax.platform_dependent(output.fresh, cpu=lambda x: x, default=hold)
    return output.replace(fresh=fresh)


def tree_choices(params: Params, output: DecoderOutput) -> Int[Array, "B T"]:
    """Return the base's most probable token after every slot, the lowest id among equals.

    A soft cap keeps the order of logits, so it is left out here.
    """
    matrix, hidden = frozen_from_base(params).lm_head, output.hidden["post_norm"]
    # On a mesh each device has a part already; a GPU would widen every part of int8 in memory.
    if jax.sharding.get_abstract_mesh().size > 1 or isinstance(matrix, Int8Matrix):
        return largest(matrix, hidden)
    return jax.lax.platform_dependent(
        matrix, hidden, cuda=largest_in_parts, rocm=largest_in_parts, default=largest
    )


def largest(matrix: Matrix, hidden: Float[Array, "*b D"]) -> Int[Array, "*b"]:
    """Return the id of the largest logit; on TPU the logits are reduced where they are made."""
    return argmax(project(matrix, hidden))


def largest_in_parts(matrix: Float[Array, "V D"], hidden: Float[Array, "*b D"]) -> Int[Array, "*b"]:
    """Return the same as `largest`, computed for one part of the vocabulary at a time.

    A GPU writes logits to memory before it compares them: for 16 rows of 26 slots and a vocabulary
    of 128k they are 203 MiB. Slices with constant bounds are read in place, those of a loop copied.
    """
    # Keep the best of the parts seen so far.
    shape, vocabulary = hidden.shape[:-1], matrix.shape[0]
    size = _part_of(vocabulary, hidden.size // hidden.shape[-1])
    best, ids = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32)
    for start in range(0, vocabulary, size):
        logits = project(matrix[start : start + size], hidden)
        peak = logits.max(axis=-1)
        ids = jnp.where(peak > best, argmax(logits) + start, ids)  # an equal one later does not win
        best = jnp.maximum(best, peak)
    return ids


def _part_of(vocabulary: int, rows: int) -> int:
    """Return how many tokens make a part, of parts that are about equal."""
    # A small last part would be merged with another, their matrices copied side by side for it.
    count = math.ceil(rows * vocabulary / MOST_LOGITS)
    return 1024 * math.ceil(vocabulary / (1024 * count))
