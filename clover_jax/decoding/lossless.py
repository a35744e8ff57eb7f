"""Lossless acceptance by rejection sampling: the text has the distribution of the base alone.

A child that was chosen without a draw has a point mass as q. Testing such children one after
another accepts child x with probability p(x) in all, and the bonus is drawn from the rest of p.
That is a single draw from p (`accept_drawn`): if the drawn token is one of the node's children the
walk continues there, else it is the bonus.

Sampled children need recursive rejection sampling (`accept_sampled`). They were drawn without
replacement from the draft's distribution q. At each node reached, with p the base's distribution
under the row's sampling parameters: accept child x with probability min(1, p(x) / q(x)); if
rejected, first p <- norm(max(p - q, 0)) with this same q, then q(x) = 0 and q renormalised. When
all are rejected the bonus token is drawn from the rest of p, at a leaf from p itself. (Removing x
from q before subtracting, or never renormalising q, changes the distribution of the text.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.commit import keep_rows
from clover_jax.decoding.draft import DraftDistributions
from clover_jax.decoding.sampling import ACCEPT, TOKEN, RowSampling, draw, gumbel, uniform, warp
from clover_jax.decoding.tree import TokenTree, TreeConfig
from clover_jax.sharding.top_k import argmax


class _DrawnWalk(struct.PyTreeNode):
    """State of a row that draws its tokens: slot, accepted nodes, whether it still descends."""

    slot: Int[Array, " B"]
    count: Int[Array, " B"]
    descends: Bool[Array, " B"]
    bonus: Int[Array, " B"]


def accept_drawn(
    tree: TokenTree,
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    length: Int[Array, " B"],
    truncate: bool,
) -> Accepted:
    """Walk from the root, drawing the next token at each node that is reached.

    logits: the base's, at every slot; only the depth + 1 visited ones of a row are warped, since
        top-p sorts a vocabulary. length: position of the root.
    """
    batch = length.shape[0]
    each, zeros = jnp.arange(batch), jnp.zeros(batch, jnp.int32)

    def visit(walk: _DrawnWalk, level: Int[Array, ""]) -> tuple[_DrawnWalk, Int[Array, " B"]]:
        # Draw the text's next token as plain decoding would, at the same position.
        warped = warp(logits[each, walk.slot][:, None], rows, truncate)[:, 0]
        token = draw(warped, rows, length + 1 + level)

        # Descend where a child holds it; else it is the bonus, and later visits change nothing.
        child = (tree.parent == walk.slot[:, None]) & (tree.tokens == token[:, None])
        descends = walk.descends & child.any(axis=-1)
        slot = jnp.where(descends, jnp.argmax(child, axis=-1).astype(jnp.int32), walk.slot)
        bonus = jnp.where(walk.descends, token, walk.bonus)
        new = _DrawnWalk(slot, walk.count + descends, descends, bonus)
        return new, jnp.where(descends, slot, 0)

    start = _DrawnWalk(slot=zeros, count=zeros, descends=jnp.ones(batch, bool), bonus=zeros)
    # One visit more than there are levels: at a leaf the last one draws the bonus.
    end, below = jax.lax.scan(visit, start, jnp.arange(tree.depth + 1))
    # The root comes first; the last visit never descends.
    path = jnp.concatenate([zeros[:, None], below[:-1].T], axis=1)
    return Accepted(path=path, count=end.count, bonus=end.bonus)


class _RejectionWalk(struct.PyTreeNode):
    """State of a row that tests its children: slot, path, and whether it still descends.

    residual: the distribution of the token after the slot, given what was rejected.
    """

    slot: Int[Array, " B"]
    path: Int[Array, "B A"]
    count: Int[Array, " B"]
    descends: Bool[Array, " B"]
    residual: Float[Array, "B V"]


class _Residual(struct.PyTreeNode):
    """What is left of p: its entries on q's few tokens, and a factor for all the others.

    on:    [B, q] p of the tokens that q gives mass.
    off:   [B] the mass of all others together.
    scale: [B] what each of the others' p is multiplied by.
    """

    on: Float[Array, "B q"]
    off: Float[Array, " B"]
    scale: Float[Array, " B"]


def accept_sampled(
    config: TreeConfig,
    tree: TokenTree,
    drafts: DraftDistributions,
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    length: Int[Array, " B"],
    truncate: bool,
) -> Accepted:
    """Walk from the root, testing each node's children in draw order.

    logits: the base's, at every slot; only visited ones are warped. length: position of the root.
    """
    children, expansion = child_slots(config), expansion_rows(config)

    batch = length.shape[0]
    each, zeros = jnp.arange(batch), jnp.zeros(batch, jnp.int32)

    def probability(slot: Int[Array, " B"]) -> Float[Array, "B V"]:
        return jax.nn.softmax(warp(logits[each, slot][:, None], rows, truncate)[:, 0], axis=-1)

    walk = _RejectionWalk(
        slot=zeros,
        path=jnp.zeros((batch, config.depth + 1), jnp.int32),
        count=zeros,
        descends=jnp.ones(batch, bool),
        residual=probability(zeros),
    )

    # One coin for every test that a row may make, from the row's own stream.
    positions = length[:, None] + 1 + jnp.arange(config.depth)
    coins = uniform(rows, positions, ACCEPT, children.shape[1])

    def descend(depth: Array, walk: _RejectionWalk) -> _RejectionWalk:
        tossed = coins[:, depth]
        return _descend(walk, depth, tree, drafts, probability, tossed, children, expansion)

    # A loop, for the compiler's sake: written out, five levels take it twice as long.
    walk = jax.lax.fori_loop(0, config.depth, descend, walk)
    # The bonus: the argmax of log p plus Gumbel noise is a draw from p.
    noise = gumbel(rows, (length + walk.count + 1)[:, None], TOKEN, logits.shape[-1])[:, 0]
    return Accepted(walk.path, walk.count, argmax(jnp.log(walk.residual) + noise))


def _descend(
    walk: _RejectionWalk,
    depth: Array,
    tree: TokenTree,
    drafts: DraftDistributions,
    probability: Callable[[Array], Array],
    coins: Float[Array, "B c"],
    children: np.ndarray,
    expansion: np.ndarray,
) -> _RejectionWalk:
    """Test the children of each row's node; go to the first accepted one, or stop."""
    # The children of each row's node, and the q that they were drawn from.
    slots = jnp.asarray(children)[walk.slot]  # [B, c], -1 where there is none
    row = jnp.maximum(jnp.asarray(expansion)[walk.slot], 0)[:, None, None]
    ids = jnp.take_along_axis(drafts.ids, row, axis=1)[:, 0]
    q = jnp.take_along_axis(drafts.probability, row, axis=1)[:, 0]
    each = jnp.arange(walk.slot.shape[0])[:, None]

    # p is kept dense and q on few tokens: a rejection changes p there, and scales the rest.
    left = _split(walk.residual, ids)
    found = jnp.full_like(walk.slot, -1)
    # Child after child in the order of their draws; the first that is accepted ends the test.
    for order in range(children.shape[1]):
        slot = slots[:, order]
        token = tree.tokens[each[:, 0], jnp.maximum(slot, 0)]
        taken = ids == token[:, None]
        q_token, p_token = (jnp.sum(jnp.where(taken, x, 0), axis=-1) for x in (q, left.on))
        # A child to which q gives nothing was never drawn, so it is not tested.
        tested = walk.descends & (found < 0) & (slot >= 0) & (q_token > 0)
        # coin < p / q, without the division.
        accepted = tested & (coins[:, order] * q_token < p_token)
        found = jnp.where(accepted, slot, found)
        rejected = tested & ~accepted
        # First p loses this draw's q, then q loses the token: this order keeps it lossless.
        left = jax.tree.map(functools.partial(keep_rows, rejected), _without_q(left, q), left)
        q = keep_rows(rejected, _without_token(q, taken), q)

    # Where a child was accepted p is its own; else the rest of p draws the bonus.
    moved = found >= 0
    stays = (walk.residual * left.scale[:, None]).at[each, ids].set(left.on)
    return _RejectionWalk(
        slot=jnp.where(moved, found, walk.slot),
        path=walk.path.at[:, depth + 1].set(jnp.where(moved, found, 0)),
        count=walk.count + moved,
        descends=moved,
        residual=keep_rows(moved, probability(jnp.maximum(found, 0)), stays),
    )


def _split(p: Float[Array, "B V"], ids: Int[Array, "B q"]) -> _Residual:
    """Split p in its entries on q's tokens and the rest."""
    each = jnp.arange(len(p))[:, None]
    # A sum without them, not 1 minus theirs: where the rest is 0 it must be exactly 0.
    off = p.at[each, ids].set(0).sum(axis=-1)
    return _Residual(on=p[each, ids], off=off, scale=jnp.ones(len(p)))


def _without_q(left: _Residual, q: Float[Array, "B q"]) -> _Residual:
    """Return norm(max(p - q, 0)); p itself where rounding leaves nothing."""
    on = jnp.maximum(left.on - q, 0)
    total = on.sum(axis=-1) + left.off
    factor = 1 / jnp.where(total > 0, total, 1)
    new = _Residual(on * factor[:, None], left.off * factor, left.scale * factor)
    return jax.tree.map(functools.partial(keep_rows, total > 0), new, left)


def _without_token(q: Float[Array, "B q"], taken: Bool[Array, "B q"]) -> Float[Array, "B q"]:
    """Return q without the drawn token, renormalised (all 0 when nothing is left)."""
    rest = jnp.where(taken, 0, q)
    total = rest.sum(axis=-1, keepdims=True)
    return rest / jnp.where(total > 0, total, 1)


def child_slots(config: TreeConfig) -> np.ndarray:
    """Return [T, c] the slots of each slot's children in draw order, padded with -1.

    Example: chain:2 gives [[1], [2], [-1]].
    """
    parents = config.parents()
    per_slot = [np.flatnonzero(parents == slot) for slot in range(config.num_slots)]
    children = np.full((config.num_slots, max(map(len, per_slot))), -1, np.int32)
    for slot, found in enumerate(per_slot):
        children[slot, : len(found)] = found
    return children


def expansion_rows(config: TreeConfig) -> np.ndarray:
    """Return [T] each slot's row in `DraftDistributions`, -1 at leaves.

    Rows are numbered in slot order, which is the order in which levels are expanded.
    """
    # Leaves are never expanded, so they have no q.
    has_children = np.isin(np.arange(config.num_slots), config.parents())
    return np.where(has_children, np.cumsum(has_children) - 1, -1).astype(np.int32)
