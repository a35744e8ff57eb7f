"""Trees of drafted tokens: their masks, and how a head grows them.

Slot 0 of a tree is the root: the token that was emitted last, which is not in the KV cache yet. The
other slots are drafted nodes, parents before children. `tree_config.py` has the static side, from
`TreeConfig` (paths of child ranks) to `CopyTree` (room for copies). In the order of this file:

    masks      which slots a slot may attend to: itself and its ancestors
    children   the candidates of a node: the most probable tokens, or draws from the draft
    static     every node is its parent's child of a fixed rank
    adaptive   the draft's own probabilities choose the nodes: EAGLE-2's rule and Clover's

`copies.py` adds nodes that are copied from the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, Params, typed
from clover_jax.decoding.sampling import CHILDREN, RowSampling, gumbel, warp
from clover_jax.decoding.tree_config import AdaptiveTree, TreeConfig
from clover_jax.drafters.drafter import PAD_TOKEN, DraftCache, FewTokens, Frozen, Proposal
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.placement import over_rows
from clover_jax.models.top_k import TopK, top_k

SUPPORT = 16  # tokens to which a sampled draft gives mass: its most probable ones
MASS, SHARE = 0.8, 0.25  # Clover: children up to this mass, and this share of the best sibling


class TokenTree(struct.PyTreeNode):
    """A drafted tree per batch row, parents before children.

    tokens: [B, T] the root and the drafted tokens; PAD_TOKEN in unused slots.
    parent: [B, T] slot of the parent, -1 at the root; [1, T] where all rows share one shape.
    depth: bound of its height; an accepted path has A = depth + 1 slots.
    copied: [B, T] whether a node was copied from the text; None where nothing is copied.
    """

    tokens: Int[Array, "B T"]
    parent: Int[Array, "B T"]
    depth: int = struct.field(pytree_node=False)
    copied: Bool[Array, "B T"] | None = None

    @classmethod
    def root_only(cls, root: Int[Array, " B"]) -> TokenTree:
        """Return the tree of one slot for each row."""
        # All rows share one `parent` row, so masks made from it are constants of the program.
        return cls(root[:, None], jnp.full((1, 1), -1), depth=0)

    def mask(self) -> Bool[Array, "B T T"]:
        """Return [b, t, s] True where slot t may attend to slot s: itself or an ancestor."""
        return ancestor_mask(self.parent, self.depth)

    def level(self) -> Int[Array, "B T"]:
        """Return the distance of each slot from the root."""
        return node_depth(self.mask())


@typed
def ancestor_mask(parent: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """Return [b, t, s] True where s is t or an ancestor of t; `depth` bounds the tree's height.

    Example: parent [[-1, 0, 1, 0]] gives rows [T,F,F,F], [T,T,F,F], [T,T,T,F], [T,F,F,T].
    """
    # Begin with each slot itself, then climb one level at a time.
    slots = jnp.arange(parent.shape[1])
    mask = jnp.broadcast_to(slots[:, None] == slots, (*parent.shape, parent.shape[1]))
    above = parent
    for _ in range(depth):
        mask |= above[..., None] == slots  # -1, above the root, equals no slot
        further = jnp.take_along_axis(parent, jnp.maximum(above, 0), axis=1)
        above = jnp.where(above < 0, -1, further)
    return mask


@typed
def node_depth(mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """Return the depth of each slot, 0 at the root, from its ancestor mask."""
    # A slot sees itself and one ancestor for each level above.
    return mask.sum(axis=-1, dtype=jnp.int32) - 1


class DraftDistributions(struct.PyTreeNode):
    """q of expanded nodes, on the few tokens to which the draft assigns mass.

    ids:         [B, n, q] target ids.
    probability: [B, n, q] sums to 1 over q; n numbers the expanded nodes, level by level.
    """

    ids: Int[Array, "B n q"]
    probability: Float[Array, "B n q"]


class Children(struct.PyTreeNode):
    """Candidates of one level's expanded nodes, as ids of the base.

    ids: [B, W, k] in the order in which they are verified.
    drafts: q of these nodes when the children were sampled from it, else None (a point mass).
    """

    ids: Int[Array, "B W k"]
    drafts: DraftDistributions | None = None


# (head, its proposal, number of children k, level) -> Children
ChooseChildren = Callable[[DraftHead, Proposal, int, int], Children]


class BestCopy(struct.PyTreeNode):
    """The root's best copy of a step: it is counted, whether it got slots or not.

    tokens: [B, d] the copied chain, PAD_TOKEN where there is none. length: [B] of the match.
    """

    tokens: Int[Array, "B d"]
    length: Int[Array, " B"]


class Drafted(struct.PyTreeNode):
    """What a draft stage leaves for the others.

    drafts: the distributions that children were drawn from; None where they are the draft's most
        probable tokens.
    copy: the best copy of the step; None for trees without room for copies.
    """

    tree: TokenTree
    drafts: DraftDistributions | None = None
    copy: BestCopy | None = None


def target_ids(head: DraftHead, ids: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Map ids of a reduced draft vocabulary to the base's; PAD_TOKEN stays."""
    table = head.config.draft_to_target
    return ids if table is None else jnp.where(ids < 0, ids, jnp.asarray(table)[ids])


def top_children(head: DraftHead, proposal: Proposal, k: int, depth: int) -> Children:
    """Choose the k most probable tokens, in that order."""
    return Children(target_ids(head, best_tokens(proposal, k).ids))


def best_tokens(proposal: Proposal, k: int) -> TopK:
    """Return the k largest logits, or log probabilities; PAD_TOKEN where a head has fewer."""
    if not isinstance(proposal, FewTokens):
        return top_k(proposal, k)
    # Few tokens are sorted already.
    ids, values = proposal.ids[..., :k], proposal.log_probability[..., :k]
    missing = ((0, 0), (0, 0), (0, k - ids.shape[-1]))
    return TopK(
        jnp.pad(values, missing, constant_values=-jnp.inf),
        jnp.pad(ids, missing, constant_values=PAD_TOKEN),
    )


def sample_children(
    rows: RowSampling, positions: Int[Array, "B d"], truncate: bool, support: int
) -> ChooseChildren:
    """Return a function that draws children without replacement from the warped draft distribution.

    positions: of the nodes of each level. support: q is restricted to this many of the draft's most
    probable tokens and renormalized, so that no [B, nodes, V] exists. Verification is exact with
    any q. Greedy rows take the most probable children.
    """
    # Greedy rows divide by 1 and draw without noise: their children are the best ones.
    hot = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Nodes of one level share their noise: a text visits only one of them.
    noise = gumbel(rows, positions, CHILDREN, support)
    noise = jnp.where((rows.temperature > 0)[:, None, None], noise, 0.0)

    def choose(head: DraftHead, proposal: Proposal, k: int, depth: int) -> Children:
        # A head that knows few tokens has no mass elsewhere.
        known = proposal.ids.shape[-1] if isinstance(proposal, FewTokens) else support
        size = min(known, support)
        values, ids = best_tokens(proposal, size)
        warped = warp(values, rows.replace(temperature=hot), truncate)
        drafts = DraftDistributions(target_ids(head, ids), jax.nn.softmax(warped, axis=-1))

        # Adding Gumbel noise and taking the k largest draws k tokens without replacement.
        noisy = warped + noise[:, depth, None, :size]
        chosen = jnp.take_along_axis(ids, top_k(noisy, min(k, size)).ids, axis=-1)
        missing = ((0, 0), (0, 0), (0, k - chosen.shape[-1]))
        chosen = target_ids(head, jnp.pad(chosen, missing, constant_values=PAD_TOKEN))
        return Children(chosen, drafts)

    return choose


class Grower(NamedTuple):
    """A head with its weights and draft cache; it grows a tree level by level."""

    head: DraftHead
    params: Params
    frozen: Frozen
    cache: DraftCache

    def propose(self, state: Any, depth: int) -> Proposal:
        """Propose the children of each node of level `depth`."""
        return self.head.apply(self.params, "propose", self.frozen, state, depth)

    def advance(
        self, state: Any, parent: Int[Array, "B W"], token: Int[Array, "B W"], depth: int
    ) -> Any:
        """Return the state after these tokens; parent: index into the nodes of the level above."""
        arguments = (self.frozen, state, self.cache, parent, token, depth)
        return self.head.apply(self.params, "advance", *arguments)


def draft_static(
    grower: Grower, root: Int[Array, " B"], state: Any, tree: TreeConfig, choose: ChooseChildren
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
        children = choose(
            grower.head, grower.propose(state, depth), int(level.rank.max()) + 1, depth
        )
        # A head whose proposal is the same for every branch returns a single one.
        children = jax.tree.map(
            lambda x, width=width: jnp.broadcast_to(x, (batch, width, *x.shape[2:])), children
        )
        # Every node is its parent's child of the node's rank.
        tokens.append(children.ids[:, level.parent, level.rank])
        if children.drafts is not None:
            drafts.append(children.drafts)

        # Go down from the nodes that have children; leaves need no state.
        width = level.expanded.size
        if width:
            parent = jnp.broadcast_to(level.parent[level.expanded], (batch, width))
            state = grower.advance(state, parent, tokens[-1][:, level.expanded], depth + 1)

    # Slots are numbered level by level, as in `TreeConfig.parents`. All rows share one row of
    # parents, so masks made from it are constants of the program.
    slots = jnp.concatenate(tokens, axis=1)
    drafted = TokenTree(slots, jnp.asarray(tree.parents())[None], tree.depth)
    if not drafts:
        return Drafted(drafted)
    return Drafted(drafted, jax.tree.map(lambda *levels: jnp.concatenate(levels, axis=1), *drafts))


def guessed_scores(tree: TreeConfig) -> Float[Array, "1 T"]:
    """Return guessed scores of a static tree's slots, by their ranks alone."""
    # The k-th child is right about half as often as the one before it.
    of_paths = [sum(-1.0 - 0.7 * rank for rank in path) for path in tree.paths]
    return jnp.array([[0.0, *of_paths]])


class Candidates(NamedTuple):
    """The children of one level's expanded nodes, flattened over (node, rank).

    token: [B, W * k]  parent: [B, W * k] index of the expanded node.
    score: [B, W * k] log of the joint probability of the path.
    share: [B, W, k] probability given the parent, descending over k.
    """

    token: Array
    parent: Array
    score: Array
    share: Array


class _Nodes(NamedTuple):
    """The drafted nodes of an adaptive tree, without the root: n of every row."""

    tokens: Int[Array, "B n"]
    parent: Int[Array, "B n"]
    scores: Float[Array, "B n"]


def draft_adaptive(
    grower: Grower, root: Int[Array, " B"], state: Any, tree: AdaptiveTree
) -> tuple[Drafted, Float[Array, "B T"]]:
    """Draft the tree that the rule chooses; children are deterministic, so q is a point mass.

    Also returns the log of the joint probability of each node, -inf in unused slots.
    """
    rule = {"dynamic": draft_dynamic, "clover4": draft_clover4}[tree.rule]
    tokens, parent, scores = rule(grower, root, state, tree)

    # The root comes first, in slot 0; it is certain, so its score is 0.
    before = ((0, 0), (1, 0))
    tokens = jnp.concatenate([root[:, None], tokens], axis=1)
    parent = jnp.pad(parent, before, constant_values=-1)
    return Drafted(TokenTree(tokens, parent, tree.depth)), jnp.pad(scores, before)


def draft_dynamic(grower: Grower, root: Array, state: Any, tree: AdaptiveTree) -> _Nodes:
    """Expand the best by joint probability, level by level; keep the best of all candidates.

    Source: EAGLE-2. A child never scores above its parent and comes later, so the best nodes
    always include their ancestors.
    """
    score = jnp.zeros((root.shape[0], 1))
    expanded = jnp.full((root.shape[0], 1), -1)  # index in the pool, -1 for the root
    tokens, scores, parents, offset = [], [], [], 0
    for depth in range(tree.depth):
        # Add the children of all expanded nodes to the pool.
        candidates = _candidates(grower, state, score, tree.width, depth)
        tokens.append(candidates.token)
        scores.append(candidates.score)
        parents.append(jnp.take_along_axis(expanded, candidates.parent, axis=1))
        # Expand the best of this level next.
        if depth + 1 < tree.depth:
            best = top_k(candidates.score, tree.width)
            state = _advance_to(grower, state, candidates, best.ids, depth + 1)
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
    return _Nodes(kept_tokens, jnp.where(parent < 0, 0, slot), kept_scores)


def draft_clover4(grower: Grower, root: Array, state: Any, tree: AdaptiveTree) -> _Nodes:
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
        candidates = _candidates(grower, state, score, tree.width, depth)
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
            state = _advance_to(grower, state, candidates, best.ids, depth + 1)
        score = jnp.where(kept, best.values, -jnp.inf)
        slots = place + 1
        used += kept.sum(axis=1, keepdims=True)
    return _Nodes(tokens, parents, scores)


def _write(nodes: Array, place: Int[Array, "B W"], new: Array) -> Array:
    """Write to places of each row; a place that is out of range is dropped."""
    return nodes.at[jnp.arange(len(nodes))[:, None], place].set(new, mode="drop")


def _candidates(
    grower: Grower, state: Any, score: Float[Array, "B W"], num_children: int, depth: int
) -> Candidates:
    """Return the most probable children of every expanded node."""
    # A child's score is its parent's plus its own log probability.
    proposal = grower.propose(state, depth)
    best = best_tokens(proposal, num_children)
    log_share = best.values
    if not isinstance(proposal, FewTokens):
        log_share -= jax.nn.logsumexp(proposal, axis=-1, keepdims=True)
    log_share = jnp.minimum(log_share, 0.0)  # rounding must not lift a child over its parent

    # A head whose proposal is the same for every branch returns a single one.
    of_nodes, flat = (*score.shape, best.ids.shape[-1]), (score.shape[0], -1)
    ids, log_share = (jnp.broadcast_to(x, of_nodes) for x in (best.ids, log_share))
    node = jnp.broadcast_to(jnp.arange(score.shape[1])[:, None], of_nodes)
    return Candidates(
        token=target_ids(grower.head, ids).reshape(flat),
        parent=node.reshape(flat),
        score=(score[..., None] + log_share).reshape(flat),
        share=jnp.exp(log_share),
    )


def _advance_to(
    grower: Grower, state: Any, candidates: Candidates, chosen: Int[Array, "B W"], depth: int
) -> Any:
    """Go one level down to the chosen children."""
    parent = jnp.take_along_axis(candidates.parent, chosen, axis=1)
    token = jnp.take_along_axis(candidates.token, chosen, axis=1)
    return grower.advance(state, parent, token, depth)
