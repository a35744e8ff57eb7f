"""The draft stage: grow a token tree level by level from the head's root state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from clover_jax.array_types import Array, Int, Params
from clover_jax.decoding.top_k import top_k
from clover_jax.decoding.tree import TokenTree, TreeConfig
from clover_jax.drafters.drafter import Frozen
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.cache import Cache


def draft(
    head: DraftHead,
    params: Params,
    frozen: Frozen,
    root: Int[Array, " B"],
    state: Any,
    cache: Cache,
    tree: TreeConfig,
) -> TokenTree:
    """Draft a static tree: each node's token is its parent's child of the node's rank.

    root: the token in slot 0. state: the head's root state. Only nodes that have children are
    advanced, so level d costs W_d recurrent steps, not one per node.
    """
    tokens = [root[:, None]]
    for depth, level in enumerate(tree.levels()):
        logits = _apply(head, params, "propose", frozen, state, depth)
        candidates = top_k(logits, int(level.rank.max()) + 1).ids
        # A head whose proposal is the same for every branch returns a single one.
        branch = level.parent if candidates.shape[1] > 1 else level.parent * 0
        children = _to_target(head, candidates[:, branch, level.rank])
        tokens.append(children)
        if level.expanded.size:
            parent = jnp.broadcast_to(
                level.parent[level.expanded], (root.shape[0], level.expanded.size)
            )
            token = children[:, level.expanded]
            state = _apply(head, params, "advance", frozen, state, cache, parent, token, depth + 1)
    tokens = jnp.concatenate(tokens, axis=1)
    return TokenTree(tokens=tokens, parent=jnp.broadcast_to(tree.parents(), tokens.shape))


def _apply(head: DraftHead, params: Params, method: str, *arguments: Any) -> Any:
    return head.module.apply({"params": params}, *arguments, method=method)


def _to_target(head: DraftHead, ids: Array) -> Array:
    """Map ids of a reduced draft vocabulary to the base's."""
    table = head.config.draft_to_target
    return ids if table is None else jnp.asarray(table)[ids]
