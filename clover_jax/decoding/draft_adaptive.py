"""Drafting of adaptive trees: the dynamic rule of EAGLE-2 and Clover's rule for small budgets."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.draft import best_tokens, target_ids
from clover_jax.decoding.tree import TokenTree
from clover_jax.drafters.drafter import PAD_TOKEN, DraftCache, FewTokens, Frozen
from clover_jax.drafters.registry import DraftHead
from clover_jax.sharding.placement import over_rows
from clover_jax.sharding.top_k import top_k

MASS, SHARE = 0.8, 0.25  # Clover: children up to this mass, and this share of the best sibling


class _Candidates(NamedTuple):
    """The children of one level's expanded nodes, flattened over (node, rank).

    token: [B, W * k]  parent: [B, W * k] index of the expanded node.
    score: [B, W * k] log of the joint probability of the path.
    share: [B, W, k] probability given the parent, descending over k.
    """

    token: Array
    parent: Array
    score: Array
    share: Array


def draft_adaptive(
    head: DraftHead,
    params: Params,
    frozen: Frozen,
    root: Int[Array, " B"],
    state: Any,
    cache: DraftCache,
    tree: AdaptiveTree,
) -> tuple[TokenTree, Float[Array, "B T"]]:
    """Draft the tree that the rule chooses; children are deterministic, so q is a point mass.

    Returns the log of the joint probability of each node too, -inf in unused slots.
    """
    rule = {"dynamic": _draft_dynamic, "clover4": _draft_clover4}[tree.rule]
    return rule(_Grower(head, params, frozen, cache, tree.width), root, state, tree)


def _draft_dynamic(
    grower: _Grower, root: Array, state: Any, tree: AdaptiveTree
) -> tuple[TokenTree, Array]:
    """Expand the best by joint probability, level by level; keep the best of all nodes seen.

    Source: EAGLE-2. A child never scores above its parent and comes later, so the best nodes
    always include their ancestors.
    """
    score = jnp.zeros((root.shape[0], 1))
    expanded = jnp.full((root.shape[0], 1), -1)  # index in the pool, -1 for the root
    tokens, scores, parents, offset = [], [], [], 0
    for depth in range(tree.depth):
        # Add the children of all expanded nodes to the pool.
        candidates = grower.children(state, score, depth)
        tokens.append(candidates.token)
        scores.append(candidates.score)
        parents.append(jnp.take_along_axis(expanded, candidates.parent, axis=1))
        # Expand the best of this level next.
        if depth + 1 < tree.depth:
            best = top_k(candidates.score, tree.width)
            state = grower.advance(state, candidates, best.ids, depth + 1)
            score, expanded = best.values, offset + best.ids
        offset += candidates.token.shape[1]

    # Rerank: of the whole pool keep the best nodes.
    pool_tokens, pool_scores, pool_parents = (
        jnp.concatenate(x, 1) for x in (tokens, scores, parents)
    )
    kept = jnp.sort(top_k(pool_scores, tree.nodes).ids, axis=1)  # parents before children
    parent = jnp.take_along_axis(pool_parents, kept, axis=1)
    # Slot of a pool index: its place among the kept ones, after the root.
    slot = jnp.argmax(parent[:, :, None] == kept[:, None, :], axis=-1) + 1
    kept_tokens, kept_scores = (
        jnp.take_along_axis(x, kept, axis=1) for x in (pool_tokens, pool_scores)
    )
    parent = jnp.where(parent < 0, 0, slot)
    return _with_root(root, kept_tokens, parent, kept_scores, tree.depth)


def _draft_clover4(
    grower: _Grower, root: Array, state: Any, tree: AdaptiveTree
) -> tuple[TokenTree, Array]:
    """Spend a budget of nodes level by level, the most probable first.

    Source: Clover. Children of a node: by descending probability while the mass before them is
    below 0.8 and they have at least a quarter of the best one's; of a level the best `remaining`
    by joint probability are kept.
    """
    batch = root.shape[0]
    tokens = jnp.full((batch, tree.nodes), PAD_TOKEN)
    parents = jnp.zeros((batch, tree.nodes), jnp.int32)
    scores = jnp.full((batch, tree.nodes), -jnp.inf)
    score, slots = jnp.zeros((batch, 1)), jnp.zeros((batch, 1), jnp.int32)
    used = jnp.zeros((batch, 1), jnp.int32)
    num_levels = tree.levels_within(grower.head.config.max_depth)
    for depth in range(num_levels):
        candidates = grower.children(state, score, depth)
        # Which children are worth a node, by the rule above.
        before = jnp.cumsum(candidates.share, axis=-1) - candidates.share
        wanted = (before < MASS) & (candidates.share >= SHARE * candidates.share[..., :1])
        best = top_k(jnp.where(wanted.reshape(batch, -1), candidates.score, -jnp.inf), tree.width)

        # The best of them take the next free slots, as long as there are any.
        place = used + jnp.arange(tree.width)
        kept = jnp.isfinite(best.values) & (place < tree.nodes)
        place = jnp.where(kept, place, tree.nodes)  # out of range: dropped
        parent = jnp.take_along_axis(candidates.parent, best.ids, axis=1)
        token = jnp.take_along_axis(candidates.token, best.ids, axis=1)
        tokens = over_rows(_write, tokens, place, token)
        above = jnp.take_along_axis(slots, parent, axis=1)
        parents = over_rows(_write, parents, place, above)
        scores = over_rows(_write, scores, place, best.values)

        # Nodes that were not kept have a score of -inf, so they get no children.
        if depth + 1 < num_levels:
            state = grower.advance(state, candidates, best.ids, depth + 1)
        score = jnp.where(kept, best.values, -jnp.inf)
        slots = place + 1
        used += kept.sum(axis=1, keepdims=True)
    return _with_root(root, tokens, parents, scores, tree.depth)


def _write(nodes: Array, place: Int[Array, "B W"], new: Array) -> Array:
    """Write to places of each row; one that is out of range is dropped."""
    return nodes.at[jnp.arange(len(nodes))[:, None], place].set(new, mode="drop")


class _Grower(NamedTuple):
    """A head with its weights, and how many children of a node are looked at."""

    head: DraftHead
    params: Params
    frozen: Frozen
    cache: DraftCache
    num_children: int

    def children(self, state: Any, score: Float[Array, "B W"], depth: int) -> _Candidates:
        """Return the most probable children of every expanded node."""
        # A child's score is its parent's plus its own log probability.
        proposal = self.head.apply(self.params, "propose", self.frozen, state, depth)
        best = best_tokens(proposal, self.num_children)
        log_share = best.values
        if not isinstance(proposal, FewTokens):
            log_share -= jax.nn.logsumexp(proposal, axis=-1, keepdims=True)
        log_share = jnp.minimum(log_share, 0.0)  # rounding must not lift a child over its parent
        # A head whose proposal is the same for every branch returns a single one.
        of_nodes, flat = (*score.shape, best.ids.shape[-1]), (score.shape[0], -1)
        ids, log_share = (jnp.broadcast_to(x, of_nodes) for x in (best.ids, log_share))
        node = jnp.broadcast_to(jnp.arange(score.shape[1])[:, None], of_nodes)
        return _Candidates(
            token=target_ids(self.head, ids).reshape(flat),
            parent=node.reshape(flat),
            score=(score[..., None] + log_share).reshape(flat),
            share=jnp.exp(log_share),
        )

    def advance(
        self, state: Any, candidates: _Candidates, chosen: Int[Array, "B W"], depth: int
    ) -> Any:
        """Go one level down to the chosen children."""
        parent = jnp.take_along_axis(candidates.parent, chosen, axis=1)
        token = jnp.take_along_axis(candidates.token, chosen, axis=1)
        return self.head.apply(
            self.params, "advance", self.frozen, state, self.cache, parent, token, depth
        )


def _with_root(
    root: Array,
    tokens: Int[Array, "B n"],
    parent: Int[Array, "B n"],
    scores: Float[Array, "B n"],
    depth: int,
) -> tuple[TokenTree, Float[Array, "B T"]]:
    """Put the root in slot 0, before the drafted nodes; it is certain, so its score is 0."""
    before = ((0, 0), (1, 0))
    tree = TokenTree(
        tokens=jnp.concatenate([root[:, None], tokens], axis=1),
        parent=jnp.pad(parent, before, constant_values=-1),
        depth=depth,
    )
    return tree, jnp.pad(scores, before)
