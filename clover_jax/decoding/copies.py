"""Copies: drafted nodes that repeat what followed the last tokens earlier in the text.

A chain of copies begins at the root, and at every drafted node after which the text has a match.
Chains with the same tokens, or tokens that the head has drafted already, share nodes. Each node has
a score, the log of the probability that it is accepted, and the best get the slots.

    score of the i-th copied node of a chain = score of its slot + sum_{i' <= i} log r(m + i')

with m the length of the match and r how often a match of that length is right: the counts of the
row so far, averaged with usual ones. Scores fall along a chain, so the best nodes always include
their ancestors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.decoding.tree import BestCopy, Drafted, TokenTree, node_depth
from clover_jax.drafters.drafter import PAD_TOKEN
from clover_jax.drafters.lookup import CONTINUATIONS, REPEATS
from clover_jax.drafters.text_matches import MOST_MATCHED, find_matches, last_tokens
from clover_jax.models.top_k import top_k

USUAL_WEIGHT = 4.0  # REPEATS count as much as this many tries of each length


class CopyCounts(struct.PyTreeNode):
    """How often the root's best copy was right in a row, by the length of the match.

    tried, right: [B, m] for lengths 0 .. MOST_MATCHED.
    """

    tried: Float[Array, "B m"]
    right: Float[Array, "B m"]


class _Ways(NamedTuple):
    """n candidate paths: each slot's path extended by copied tokens, and more copies at the root.

    tokens:  [B, n, d] the tokens on the path, PAD_TOKEN beyond its end.
    is_copy: [B, n, d] whether a token was copied; else it was drafted, or there is none.
    score:   [B, n, d] log of the probability that a copy is accepted, -inf elsewhere.
    best:    the root's first way.
    """

    tokens: Int[Array, "B n d"]
    is_copy: Bool[Array, "B n d"]
    score: Float[Array, "B n d"]
    best: BestCopy


def no_counts(batch: int) -> CopyCounts:
    """Return the counts of rows without a tried copy."""
    return CopyCounts(*(jnp.zeros((batch, MOST_MATCHED + 1)) for _ in range(2)))


def count_copies(
    counts: CopyCounts, best: BestCopy, emitted: Int[Array, "B A"], number: Int[Array, " B"]
) -> CopyCounts:
    """Count how far a step's best copy went with the text; the first number[b] tokens are valid."""
    depth = best.tokens.shape[1]
    follows = jnp.cumprod(best.tokens == emitted[:, :depth], axis=1).astype(bool)
    # A copied token is tried if all before it were right and the text came this far.
    is_tried = jnp.pad(follows[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    is_tried &= (best.tokens != PAD_TOKEN) & (jnp.arange(depth) < number[:, None])
    # Each token of the copy makes the match longer.
    length = jnp.minimum(best.length[:, None] + jnp.arange(depth), MOST_MATCHED)
    of_length = jax.nn.one_hot(length, MOST_MATCHED + 1) * is_tried[..., None]
    right = (of_length * follows[..., None]).sum(axis=1)
    return CopyCounts(counts.tried + of_length.sum(axis=1), counts.right + right)


def _repeats(counts: CopyCounts) -> Float[Array, "B m"]:
    """Return how often a match of each length is right in each row."""
    usual = USUAL_WEIGHT * jnp.asarray(REPEATS)
    return (usual + counts.right) / (USUAL_WEIGHT + counts.tried)


def add_copies(
    drafted: TokenTree,
    score: Float[Array, "B T"],
    text: Int[Array, "B S"],
    end: Int[Array, " B"],
    counts: CopyCounts,
    nodes: int,
    depth: int,
    *,
    keep_drafted: bool,
) -> Drafted:
    """Return a tree of `nodes` nodes: the best of the drafted nodes and the copies.

    score: log of the probability that each drafted node is accepted, 0 at the root; -inf drops it.
    text: tokens that may be copied, PAD_TOKEN elsewhere. end: position of the root, the last token.
    counts: of the row's copies so far.
    depth: bound of the tree's height.
    keep_drafted: whether drafted nodes keep their slots, however good the copies are.
    """
    num_slots = drafted.tokens.shape[1]
    # Copies differ, so each row has a tree of its own shape from here on.
    parent = jnp.broadcast_to(drafted.parent, drafted.tokens.shape)
    drafted = drafted.replace(parent=parent)
    mask = drafted.mask()
    level = node_depth(mask)
    ways = _ways(drafted, mask, level, score, text, end, _repeats(counts), depth)

    # same[n, m, d]: the ways n and m are one down to depth d + 1. at_slot[n, t, d]: slot t is the
    # node of way n there.
    same = jnp.cumprod(ways.tokens[:, :, None] == ways.tokens[:, None], axis=-1).astype(bool)
    same &= (ways.tokens != PAD_TOKEN)[:, :, None]
    at_slot = same[:, :, :num_slots] & (level[:, None, :, None] == jnp.arange(1, depth + 1))

    # A node on several ways belongs to the first of them and has the best score of all.
    copies = same & ways.is_copy[:, None]
    first = jnp.argmax(copies, axis=2)
    is_own = ways.is_copy & ~at_slot.any(axis=2) & (first == jnp.arange(first.shape[1])[:, None])
    worth = jnp.where(copies, ways.score[:, None], -jnp.inf).max(axis=2)
    own_depth = jnp.maximum(level - 1, 0)[..., None]
    of_slots = jnp.take_along_axis(worth[:, :num_slots], own_depth, axis=-1)[..., 0]
    of_slots = jnp.full_like(score, jnp.inf) if keep_drafted else jnp.maximum(score, of_slots)

    # All nodes in the order of slots: the drafted ones, then the copies, level by level.
    pool = _joined(of_slots, jnp.where(is_own, worth, -jnp.inf))
    tokens, above = _joined(drafted.tokens, ways.tokens), _parents(parent, at_slot, first)
    # The best keep that order. No node is worth more than its parent, so parents are kept.
    best = top_k(pool, nodes)
    kept = jnp.sort(jnp.where(best.values > -jnp.inf, best.ids, pool.shape[1]), axis=1)
    # Places that got no node sort last: their index is beyond the pool.
    is_node, index = kept < pool.shape[1], jnp.minimum(kept, pool.shape[1] - 1)
    parents = jnp.take_along_axis(above, index, axis=1)
    slot = jnp.argmax(parents[..., None] == kept[:, None], axis=-1) + 1
    before = ((0, 0), (1, 0))  # the root comes first
    chosen = jnp.where(is_node, jnp.take_along_axis(tokens, index, axis=1), PAD_TOKEN)
    tree = TokenTree(
        tokens=jnp.concatenate([drafted.tokens[:, :1], chosen], axis=1),
        parent=jnp.pad(jnp.where(is_node & (parents >= 0), slot, 0), before, constant_values=-1),
        depth=depth,
        copied=jnp.pad(is_node & (kept >= num_slots - 1), before),
    )
    return Drafted(tree, copy=ways.best)


def _joined(of_slots: Array, of_ways: Array) -> Array:
    """Join the values of all nodes but the root, [B, T] of slots and [B, n, d] of ways: [B, p]."""
    by_level = of_ways.swapaxes(1, 2).reshape(len(of_ways), -1)
    return jnp.concatenate([of_slots[:, 1:], by_level], axis=1)


def _parents(
    parent: Int[Array, "B T"], at_slot: Bool[Array, "B n T d"], first: Int[Array, "B n d"]
) -> Int[Array, "B p"]:
    """Return each pool node's parent: its index in the pool, -1 for the root."""
    _, num_ways, num_slots, depth = at_slot.shape
    # The node above, on the same way: a slot, or a copy of the first way that has it.
    copy = num_slots - 1 + jnp.arange(depth) * num_ways + first
    node = jnp.where(at_slot.any(axis=2), jnp.argmax(at_slot, axis=2) - 1, copy)
    above = jnp.pad(node[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    return _joined(parent - 1, above)


def _ways(
    tree: TokenTree,
    mask: Bool[Array, "B T T"],
    level: Int[Array, "B T"],
    score: Float[Array, "B T"],
    text: Int[Array, "B S"],
    end: Int[Array, " B"],
    repeats: Float[Array, "B m"],
    depth: int,
) -> _Ways:
    """Return the way through every slot, continued with copies, and the root's other ways."""
    # After every slot the best match; after the root several, with different continuations.
    suffix = _suffixes(tree, text, end)
    at_root = find_matches(text, end, suffix[:, :1], CONTINUATIONS)
    matches = jax.tree.map(
        lambda slots, root: jnp.concatenate([slots[..., 0], root[:, 0, 1:]], axis=1),
        find_matches(text, end, suffix, 1),
        at_root,
    )
    place, length = matches.place, matches.length
    more = ((0, 0), (0, CONTINUATIONS - 1))  # the root's other ways have no drafted part
    begin = jnp.pad(level, more)

    # The drafted part of a way: the ancestor at each depth.
    on_way = mask[:, :, None] & (level[:, None, None] == jnp.arange(1, depth + 1)[:, None])
    drafted = jnp.sum(jnp.where(on_way, tree.tokens[:, None, None], 0), axis=-1)
    drafted = jnp.pad(drafted, (*more, (0, 0)))

    # The copied part: the text after the match up to its end, then the drafted part, then again
    # from the match on, as a text that loops would continue. A source text just ends.
    own, size = end[:, None] + 1, text.shape[1]
    is_own = place < own
    known = jnp.where(is_own, own, size) - place
    turn = jnp.where(is_own, known + begin, size)[..., None]
    ahead = jnp.arange(depth) - begin[..., None]
    step = jnp.maximum(ahead, 0) % jnp.maximum(turn, 1)
    index = jnp.minimum(place[..., None] + step, size - 1)
    of_text = jnp.take_along_axis(text, index.reshape(len(text), -1), axis=1).reshape(index.shape)
    beyond = step - known[..., None]
    of_draft = jnp.take_along_axis(drafted, jnp.clip(beyond, 0, depth - 1), axis=-1)
    copied = jnp.where(beyond < 0, of_text, jnp.where(is_own[..., None], of_draft, PAD_TOKEN))
    ends = jnp.cumsum((copied == PAD_TOKEN) & (ahead >= 0), axis=-1) > 0
    is_copy = (length[..., None] > 0) & (ahead >= 0) & ~ends
    copied = jnp.where(is_copy, copied, PAD_TOKEN)

    # A longer match is more often right, and a copied token makes the match longer.
    longer = jnp.minimum(length[..., None] + jnp.maximum(ahead, 0), MOST_MATCHED)
    right = jnp.take_along_axis(repeats[:, None], longer, axis=-1)
    steps = jnp.cumsum(jnp.where(is_copy, jnp.log(right), 0.0), axis=-1)
    # The root's k-th way is right only where the ways before it are wrong.
    of_root = jnp.take_along_axis(repeats, at_root.length[:, 0], axis=-1)
    wrong = jnp.cumprod(1 - of_root, axis=-1)[:, :-1]
    of_begin = jnp.concatenate([score, jnp.log(wrong)], axis=1)
    return _Ways(
        tokens=jnp.where(ahead < 0, drafted, copied),
        is_copy=is_copy,
        score=jnp.where(is_copy, of_begin[..., None] + steps, -jnp.inf),
        best=BestCopy(copied[:, 0], length[:, 0]),
    )


def _suffixes(tree: TokenTree, text: Int[Array, "B S"], end: Array) -> Int[Array, "B T l"]:
    """Return the last tokens at each slot, newest first: of its ancestors, then of the text."""
    before = last_tokens(text, end)  # the root is the first of them
    # Climb one node at a time; beyond the root come the text's tokens, backwards.
    at = jnp.broadcast_to(jnp.arange(tree.tokens.shape[1]), tree.tokens.shape)
    suffix, back = [], jnp.zeros_like(at)
    for _ in range(MOST_MATCHED):
        below = jnp.take_along_axis(tree.tokens, at, axis=1)
        suffix.append(jnp.where(at > 0, below, jnp.take_along_axis(before, back, axis=1)))
        back += at == 0
        at = jnp.where(at > 0, jnp.maximum(jnp.take_along_axis(tree.parent, at, axis=1), 0), 0)
    return jnp.stack(suffix, axis=-1)
