"""The verify stage: one base forward over all slots of every row's tree."""

from __future__ import annotations

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.tree import TokenTree, ancestor_mask, node_depth
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.cache import Cache
from clover_jax.models.decoder import Decoder, DecoderOutput, project


def verify(
    config: BaseConfig,
    params: Params,
    tree: TokenTree,
    depth: int,
    cache: Cache,
    length: Int[Array, " B"],
) -> DecoderOutput:
    """Run the base over each row's tree after length[b] positions, each slot seeing its ancestors.

    depth: bound of the tree's height; a slot's position is length + its depth.
    """
    mask = ancestor_mask(tree.parent, depth)
    positions = length[:, None] + node_depth(mask)
    return Decoder(config).apply({"params": params}, tree.tokens, positions, mask, cache, length)


def tree_logits(params: Params, output: DecoderOutput) -> Float[Array, "B T V"]:
    """Return the base's logits of the token after every slot."""
    return project(frozen_from_base(params).lm_head, output.hidden["post_norm"])
