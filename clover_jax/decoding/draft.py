"""The draft stage: grow a token tree level by level from the head's root state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.decoding.copies import BestCopy
from clover_jax.decoding.sampling import CHILDREN, RowSampling, gumbel, warp
from clover_jax.decoding.tree import TokenTree, TreeConfig
from clover_jax.drafters.drafter import PAD_TOKEN, DraftCache, FewTokens, Frozen, Proposal
from clover_jax.drafters.registry import DraftHead
from clover_jax.sharding.top_k import TopK, top_k

SUPPORT = 16  # tokens to which a sampled draft gives mass: its most probable ones


class DraftDistributions(struct.PyTreeNode):
    """q of expanded nodes, on the few tokens that the draft gives any mass.

    ids:         [B, n, q] target ids.
    probability: [B, n, q] sums to 1 over q; n counts expanded nodes, level by level.
    """

    ids: Int[Array, "B n q"]
    probability: Float[Array, "B n q"]


class Children(struct.PyTreeNode):
    """Candidates of one level's expanded nodes.

    ids: [B, W, k] in the order in which they are verified.
    drafts: q of these nodes when the children were sampled from it, else None (a point mass).
    """

    ids: Int[Array, "B W k"]
    drafts: DraftDistributions | None = None


class Drafted(struct.PyTreeNode):
    """A drafted tree.

    drafts: for sampled children, the distributions they came from.
    copy: for a tree with copies, the best of them.
    """

    tree: TokenTree
    drafts: DraftDistributions | None = None
    copy: BestCopy | None = None


# (what the head proposes, number of children k, level) -> Children
ChooseChildren = Callable[[Proposal, int, int], Children]


def draft(
    head: DraftHead,
    params: Params,
    frozen: Frozen,
    root: Int[Array, " B"],
    state: Any,
    cache: DraftCache,
    tree: TreeConfig,
    choose: ChooseChildren,
) -> Drafted:
    """Draft a static tree: each node is its parent's child of the node's rank.

    root: the token in slot 0. state: the head's root state. Only nodes that have children are
    advanced, so level d costs W_d recurrent steps, not one per node.
    """
    # In a tree like copy:25 all nodes are copies of the text, and no head is asked.
    if not tree.num_nodes:
        return Drafted(TokenTree.root_only(root))

    batch, width = root.shape[0], 1
    tokens, drafts = [root[:, None]], []
    for depth, level in enumerate(tree.levels()):
        proposal = head.apply(params, "propose", frozen, state, depth)
        candidates = _to_target(head, choose(proposal, int(level.rank.max()) + 1, depth))
        # A head whose proposal is the same for every branch returns a single one.
        candidates = jax.tree.map(
            lambda x, width=width: jnp.broadcast_to(x, (batch, width, *x.shape[2:])), candidates
        )
        # Every node is its parent's child of the node's rank.
        tokens.append(candidates.ids[:, level.parent, level.rank])
        drafts.append(candidates.drafts)

        # Go down from the nodes that have children; leaves need no state.
        width = level.expanded.size
        if width:
            parent = jnp.broadcast_to(level.parent[level.expanded], (batch, width))
            token = tokens[-1][:, level.expanded]
            state = head.apply(params, "advance", frozen, state, cache, parent, token, depth + 1)

    # Slots lie level by level, as `TreeConfig.parents` numbers them.
    slots = jnp.concatenate(tokens, axis=1)
    parents = jnp.asarray(tree.parents())[None]  # one for all rows: what follows is folded
    # Levels without a distribution are None, which is an empty pytree: the result is then None.
    joined = jax.tree.map(lambda *levels: jnp.concatenate(levels, axis=1), *drafts)
    return Drafted(TokenTree(slots, parents, tree.depth), joined)


def top_children(proposal: Proposal, k: int, depth: int) -> Children:
    """Choose the k most probable tokens, in that order."""
    return Children(best_tokens(proposal, k).ids)


def best_tokens(proposal: Proposal, k: int) -> TopK:
    """Return the k largest logits, or log probabilities; PAD_TOKEN where a head knows no more."""
    if not isinstance(proposal, FewTokens):
        return top_k(proposal, k)
    # They come in this order already.
    ids, values = proposal.ids[..., :k], proposal.log_probability[..., :k]
    missing = ((0, 0), (0, 0), (0, k - ids.shape[-1]))
    return TopK(
        jnp.pad(values, missing, constant_values=-jnp.inf),
        jnp.pad(ids, missing, constant_values=PAD_TOKEN),
    )


def sample_children(
    rows: RowSampling, positions: Int[Array, "B d"], truncate: bool, support: int
) -> ChooseChildren:
    """Return a choice of children drawn without replacement from the warped draft distribution.

    positions: of the nodes of each level. support: number of the draft's most probable tokens that
    q is restricted to, renormalised, so that no [B, nodes, V] exists. Greedy rows take the most
    probable children; verification is exact with any q.
    """
    # Greedy rows divide by 1 and draw without noise: their children are the best ones.
    hot = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Nodes of one level share their noise: a text visits only one of them.
    noise = gumbel(rows, positions, CHILDREN, support)
    noise = jnp.where((rows.temperature > 0)[:, None, None], noise, 0.0)

    def choose(proposal: Proposal, k: int, depth: int) -> Children:
        # A head that knows few tokens gives mass to no others.
        known = proposal.ids.shape[-1] if isinstance(proposal, FewTokens) else support
        size = min(known, support)
        values, ids = best_tokens(proposal, size)
        warped = warp(values, rows.replace(temperature=hot), truncate)
        drafts = DraftDistributions(ids, jax.nn.softmax(warped, axis=-1))

        # Adding Gumbel noise and taking the k largest draws k tokens without replacement.
        noisy = warped + noise[:, depth, None, :size]
        chosen = jnp.take_along_axis(ids, top_k(noisy, min(k, size)).ids, axis=-1)
        missing = ((0, 0), (0, 0), (0, k - chosen.shape[-1]))
        return Children(jnp.pad(chosen, missing, constant_values=PAD_TOKEN), drafts)

    return choose


def _to_target(head: DraftHead, children: Children) -> Children:
    drafts = children.drafts and children.drafts.replace(ids=target_ids(head, children.drafts.ids))
    return Children(target_ids(head, children.ids), drafts)


def target_ids(head: DraftHead, ids: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Map ids of a reduced draft vocabulary to the base's; PAD_TOKEN stays."""
    table = head.config.draft_to_target
    return ids if table is None else jnp.where(ids < 0, ids, jnp.asarray(table)[ids])
