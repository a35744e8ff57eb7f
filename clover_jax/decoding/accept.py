"""The accept stage: the path of the verified tree that becomes text, and the token after it.

Greedy, typical and forced acceptance take the longest path whose nodes pass a test. Lossless
acceptance is rejection sampling: the text has the distribution of the base alone.

A child that was chosen without a draw has a point mass as q. Testing such children one after
another accepts child x with probability p(x) in all, and the bonus is drawn from the rest of p.
That is a single draw from p (`accept_drawn`): if the drawn token is one of the node's children the
walk continues there, else it is the bonus.

Sampled children need recursive rejection sampling (`accept_sampled`). They were drawn without
replacement from the draft's distribution q. At each node reached, with p the base's distribution
under the row's sampling parameters: accept child x with probability min(1, p(x) / q(x)); if
rejected, first p <- norm(max(p - q, 0)) with this same q, then q(x) = 0 and q renormalized. When
all are rejected the bonus token is drawn from the rest of p, at a leaf from p itself. (Removing x
from q before subtracting, or never renormalizing q, changes the distribution of the text.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, typed
from clover_jax.decoding.sampling import ACCEPT, TOKEN, RowSampling, draw, gumbel, uniform, warp
from clover_jax.decoding.tree import DraftDistributions, TokenTree, node_depth
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.models.top_k import argmax


class Accepted(struct.PyTreeNode):
    """The accepted path of each row.

    path:  [B, A] slots from the root down; the first count + 1 are valid, the others are 0.
    count: [B] accepted drafted tokens.
    bonus: [B] the base's own token after the last accepted node.
    """

    path: Int[Array, "B A"]
    count: Int[Array, " B"]
    bonus: Int[Array, " B"]


@typed
def accept_path(tree: TokenTree, following: Int[Array, "B T"]) -> Accepted:
    """Accept the longest root path whose every token is the base's own choice at its parent.

    following: the token that the base puts after every slot, its argmax.
    Siblings carry different tokens, so at most one path qualifies.

    Example: tokens [[5, 7, 8, 9]], parent [[-1, 0, 1, 0]] and following [[7, 8, 4, 0]] accept slots
    0, 1, 2 with bonus 4.
    """
    # Scores only break ties between paths of one length, and here no ties occur.
    passes = _is_chosen(tree, following)
    return _longest(tree, passes, jnp.zeros(tree.tokens.shape), following)


def accept_typical(
    tree: TokenTree, log_probability: Float[Array, "B T V"], epsilon: float, delta: float
) -> Accepted:
    """Accept the longest path of typical tokens. NOT lossless: the text's distribution changes.

    Medusa's rule: a node passes when p(x) > min(epsilon, delta exp(-H)) at its parent, with
    H = -sum p log(p + 1e-5), and all its ancestors pass; ties between paths of one length go to the
    most probable; the next token is the base's argmax.

    log_probability: log p of the base at its sampling temperature, at every slot.
    """
    # The more certain the base is, the more probable a token must be.
    p = jnp.exp(log_probability)
    entropy = -jnp.sum(p * jnp.log(p + 1e-5), axis=-1)
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))

    # A node is judged at its parent, which predicts it.
    parent = jnp.maximum(tree.parent, 0)
    row = jnp.arange(tree.tokens.shape[0])[:, None]
    own = log_probability[row, parent, jnp.maximum(tree.tokens, 0)]
    passes = jnp.exp(own) > threshold[row, parent]
    # An unused slot holds PAD_TOKEN, for which token 0 was looked up above.
    passes &= tree.tokens >= 0
    return _longest(tree, passes, own, argmax(log_probability))


@typed
def accept_forced(tree: TokenTree, following: Int[Array, "B T"], count: int) -> Accepted:
    """Accept exactly `count` drafted tokens, for timing: the text means nothing.

    following: as for `accept_path`. Of the paths of that length it takes one with the most of the
    base's own choices, so that the choices decide what is committed, as in real decoding. Of a
    shallower tree the deepest path is accepted.
    """
    # Any token passes down to level `count`; unused slots hold PAD_TOKEN and stay out.
    passes = (tree.level() <= count) & (tree.tokens >= 0)
    score = _is_chosen(tree, following).astype(jnp.float32)
    return _longest(tree, passes, score, following)


def _is_chosen(tree: TokenTree, following: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return whether each slot's token is the base's choice after its parent."""
    # PAD_TOKEN equals no choice. The root's result is not used: `_longest` always keeps the root.
    return tree.tokens == jnp.take_along_axis(following, jnp.maximum(tree.parent, 0), axis=1)


def _longest(
    tree: TokenTree,
    passes: Bool[Array, "B T"],
    score: Float[Array, "B T"],
    following: Int[Array, "B T"],
) -> Accepted:
    """Accept the longest path of passing slots, the largest sum of scores among equals."""
    # A slot is kept if it and all its ancestors pass.
    mask = tree.mask()
    is_root = tree.parent < 0
    kept = jnp.all((passes | is_root)[:, None, :] | ~mask, axis=-1)

    # The longest kept path of each row, by the score where several are as long.
    level = node_depth(mask)
    count = jnp.where(kept, level, 0).max(axis=-1)
    candidates = kept & (level == count[:, None])
    # The root belongs to every path and was emitted before: its score does not count.
    total = jnp.sum(jnp.where(mask & ~is_root[:, None, :], score[:, None, :], 0.0), axis=-1)
    end = jnp.argmax(jnp.where(candidates, total, -jnp.inf), axis=-1)[:, None]

    # Its slots from the root down: the ancestor at each depth.
    on_path = jnp.take_along_axis(mask, end[..., None], axis=1)  # [B, 1, T]
    # Beyond the end no slot has the depth, and argmax gives 0, the root: `commit` relies on it.
    at_depth = on_path & (level[:, None, :] == jnp.arange(tree.depth + 1)[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    return Accepted(path, count, jnp.take_along_axis(following, end, axis=1)[:, 0])


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

    residual: the distribution of the token after the slot, given the rejected children.
    """

    slot: Int[Array, " B"]
    path: Int[Array, "B A"]
    count: Int[Array, " B"]
    descends: Bool[Array, " B"]
    residual: Float[Array, "B V"]


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

    logits: the base's, at every slot; only visited slots are warped. length: position of the root.
    """
    children, has_children = (
        config.children(),
        np.isin(np.arange(config.num_slots), config.parents()),
    )
    # Each slot's row in `drafts`: levels were expanded in slot order. Leaves have no q.
    expansion = np.where(has_children, np.cumsum(has_children) - 1, -1).astype(np.int32)
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
        # The children of each row's node, and the q that they were drawn from.
        slots = jnp.asarray(children)[walk.slot]  # [B, c], -1 where there is none
        row = jnp.maximum(jnp.asarray(expansion)[walk.slot], 0)[:, None, None]
        ids = jnp.take_along_axis(drafts.ids, row, axis=1)[:, 0]
        q = jnp.take_along_axis(drafts.probability, row, axis=1)[:, 0]
        found, rest = _test_children(walk, tree, slots, ids, q, tossed)

        # Where a child was accepted p is its own; else the rest of p draws the bonus.
        moved = found >= 0
        return _RejectionWalk(
            slot=jnp.where(moved, found, walk.slot),
            path=walk.path.at[:, depth + 1].set(jnp.where(moved, found, 0)),
            count=walk.count + moved,
            descends=moved,
            residual=keep_rows(moved, probability(jnp.maximum(found, 0)), rest),
        )

    # A loop, for the compiler's sake: unrolled, five levels take it twice as long.
    walk = jax.lax.fori_loop(0, config.depth, descend, walk)
    # The bonus: the argmax of log p plus Gumbel noise is a draw from p.
    noise = gumbel(rows, (length + walk.count + 1)[:, None], TOKEN, logits.shape[-1])[:, 0]
    return Accepted(walk.path, walk.count, argmax(jnp.log(walk.residual) + noise))


class _Residual(struct.PyTreeNode):
    """The rest of p: its entries on q's few tokens, and a factor for all other tokens.

    on:    [B, q] p of the tokens to which q assigns mass.
    off:   [B] the mass of all other tokens together.
    scale: [B] the factor by which the others' p is multiplied.
    """

    on: Float[Array, "B q"]
    off: Float[Array, " B"]
    scale: Float[Array, " B"]

    def without(self, q: Float[Array, "B q"]) -> _Residual:
        """Return norm(max(p - q, 0)); p itself where rounding leaves nothing."""
        on = jnp.maximum(self.on - q, 0)
        total = on.sum(axis=-1) + self.off
        factor = 1 / jnp.where(total > 0, total, 1)
        new = _Residual(on * factor[:, None], self.off * factor, self.scale * factor)
        return jax.tree.map(functools.partial(keep_rows, total > 0), new, self)


def _test_children(
    walk: _RejectionWalk,
    tree: TokenTree,
    slots: Int[Array, "B c"],
    ids: Int[Array, "B q"],
    q: Float[Array, "B q"],
    coins: Float[Array, "B c"],
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Test the children of each row's node in draw order; the first accepted one ends the test.

    slots: the children, -1 where there is none. ids, q: the distribution that they were drawn from.
    Returns the accepted slot, -1 where there is none, and the rest of p.
    """
    each, p = jnp.arange(walk.slot.shape[0])[:, None], walk.residual
    # p stays dense and q on few tokens: a rejection changes p there, and scales the rest.
    # The mass off q is a sum, not 1 minus the others: where it is 0 it must be exactly 0.
    off = p.at[each, ids].set(0).sum(axis=-1)
    left = _Residual(on=p[each, ids], off=off, scale=jnp.ones(len(p)))
    found = jnp.full_like(walk.slot, -1)

    for order in range(slots.shape[1]):
        slot = slots[:, order]
        token = tree.tokens[each[:, 0], jnp.maximum(slot, 0)]
        taken = ids == token[:, None]
        q_token, p_token = (jnp.sum(jnp.where(taken, x, 0), axis=-1) for x in (q, left.on))
        # A child with q(x) = 0 was never drawn, so it is not tested.
        tested = walk.descends & (found < 0) & (slot >= 0) & (q_token > 0)
        # coin < p / q, without the division.
        accepted = tested & (coins[:, order] * q_token < p_token)
        found = jnp.where(accepted, slot, found)
        rejected = tested & ~accepted

        # First p loses this draw's q, then q loses the token: this order keeps it lossless.
        left = jax.tree.map(functools.partial(keep_rows, rejected), left.without(q), left)
        q = keep_rows(rejected, _without_token(q, taken), q)
    return found, (p * left.scale[:, None]).at[each, ids].set(left.on)


def _without_token(q: Float[Array, "B q"], taken: Bool[Array, "B q"]) -> Float[Array, "B q"]:
    """Return q without the drawn token, renormalized; all 0 when no token is left."""
    rest = jnp.where(taken, 0, q)
    total = rest.sum(axis=-1, keepdims=True)
    return rest / jnp.where(total > 0, total, 1)


def keep_rows(condition: Bool[Array, " B"], new: Array, old: Array) -> Array:
    """Select whole rows: `new` where the condition holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
