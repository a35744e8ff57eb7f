"""Which (position of the head, position of the text) pairs count, and where their target lies.

Position i of the head at t predicts x_{t+2+i}; its target state is the base's g at t+1+i. Here
pairs are named by their *target index* s = t+1+i instead of t: then the P pairs that share a
target state, and so the teacher's softmax, lie in one column.

Clover-2's optional `label_mask` leaves out what the base itself would have rejected before. A_s
holds those of the base's 8 most probable tokens at s whose preceding cumulative probability is at
most 0.8. The pair (t, i) counts only when x_{t+1+j} lies in A_{t+j} for every j = 0 .. i: had the
base been unlikely to go that way, verification would have stopped there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project
from clover_jax.models.int8 import Matrix

# Of the label mask: how many tokens A holds at most, and the mass that may come before one of them.
CANDIDATES = 8
PRECEDING_MASS = 0.8


def pair_mask(
    segment_ids: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    num_positions: int,
    likely: Bool[Array, "B S"] | None = None,
) -> Bool[Array, "P B S"]:
    """Return [i, b, s] True where the pair (s - 1 - i, i) counts.

    likely: [b, s] whether x_{s+1} is a token that the base may choose at s; where given, it must
        hold at s-1-i .. s-1.

    It does when m_{s-1} is set and s - 1 - i and s lie in one document. (m_{t+i} of the
    release is m_{s-1}: the mask does not depend on i. That a document's last position never
    counts follows from s being in the same document.)

    Example: segment_ids [[1, 1, 1, 2]], loss_mask all True and P = 2 give
    [[F, T, T, F]] for i = 0 and [[F, F, T, F]] for i = 1.
    """
    # m_{s-1} is unset before the row's first token.
    counted = shift_right(loss_mask, 1)

    masks = []
    reached: Array | bool = True
    for i in range(num_positions):
        source = shift_right(segment_ids, i + 1)
        if likely is not None:
            # Position i needs one more than position i - 1, further back.
            reached = reached & shift_right(likely, i + 1)
        # Segment 0 is padding.
        masks.append(counted & (source == segment_ids) & (segment_ids > 0) & reached)
    return jnp.stack(masks)


def sample_anchors(key: Array, batch: Batch, count: int) -> Int[Array, "B M"]:
    """Return places of x_{t+1}, drawn anew at each step, for heads that train at few positions.

    They are supervised tokens that are followed by another of their document. A row with fewer than
    `count` of them is filled up with its last place, at which no pair counts.
    """
    size = batch.tokens.shape[1]
    is_possible = batch.loss_mask & labelled_targets(batch.segment_ids)
    # The largest of random numbers give a sample without repeats.
    order = jnp.where(is_possible, jax.random.uniform(key, batch.tokens.shape), -1.0)
    value, anchors = jax.lax.top_k(order, min(count, size))
    return jnp.where(value < 0, size - 1, anchors)


def anchored_mask(
    batch: Batch,
    anchors: Int[Array, "B M"],
    num_positions: int,
    likely: Bool[Array, "B S"] | None = None,
) -> Bool[Array, "P B M"]:
    """Return [i, b, m] True where position i of the block at an anchor counts.

    It does when its target token, x_{t+2+i}, is supervised and of the anchor's document.
    likely: as in `pair_mask`.

    Example: segment_ids [[1, 1, 1, 2]], loss_mask all True and anchors [[0, 1]] give, for P = 2,
    [[T, T]] and [[T, F]].
    """
    size = batch.tokens.shape[1]

    def at(x: Array, further: int) -> Array:
        index = jnp.clip(anchors + further, 0, size - 1)
        return jnp.take_along_axis(x, index, axis=1)

    masks = []
    reached: Array | bool = True
    segment = at(batch.segment_ids, 0)
    for i in range(num_positions):
        # `at` clips places beyond the row, which `is_inside` then masks.
        if likely is not None:
            # The token i places after the anchor must be one that the base may choose there.
            reached = reached & at(likely, i - 1)
        is_inside = (anchors + i + 1 < size) & (at(batch.segment_ids, i + 1) == segment)
        masks.append(at(batch.loss_mask, i + 1) & is_inside & (segment > 0) & reached)
    return jnp.stack(masks)


def labelled_targets(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Return [b, s] True where x_{s+1}, the label at s, is of the same document.

    Example: segment_ids [[1, 1, 2, 0]] give [[T, F, F, F]].
    """
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (following == segment_ids) & (segment_ids > 0)


def shift_right(x: Array, by: int) -> Array:
    """Slot s of [B, S] gets x[s - by], 0 before the start: [[5, 6, 7]] by 1 is [[0, 5, 6]]."""
    size = x.shape[1]
    return jnp.pad(x, ((0, 0), (by, 0)))[:, :size]


def likely_next(
    lm_head: Matrix,
    states: Float[Array, "B S D"],
    tokens: Int[Array, "B S"],
    chunk: int,
    groups: int = 1,
    cap: float | None = None,
) -> Bool[Array, "B S"]:
    """Return [b, s] True where x_{s+1} lies in A_s; the last column is meaningless.

    cap: the base's soft cap of logits.
    states: the base's g. chunk: positions of a group whose logits exist at a time. groups: of
        rows, side by side as in the loss, so that each device of a mesh looks at its own.
    """
    following = jnp.roll(tokens, -1, axis=1)

    # [V] logits for one position, `chunk` positions of each group at a time.
    def one(position: tuple[Array, Array]) -> Array:
        state, token = position
        return among_likely(project(lm_head, state, cap), token)

    def of_group(positions: tuple[Array, Array]) -> Array:
        return jax.lax.map(one, positions, batch_size=chunk)

    # Each group by itself, so that no state leaves its device.
    flat = (states.reshape(groups, -1, states.shape[-1]), following.reshape(groups, -1))
    return jax.vmap(of_group)(flat).reshape(tokens.shape)


def among_likely(logits: Float[Array, " V"], token: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether a token is one of A, for the logits of one position.

    Example: probabilities .5, .4, .1 give A = {0, 1}: before token 2 lies a mass of .9.
    """
    ids = jnp.arange(logits.shape[-1])
    # By sums over the vocabulary: on a mesh `lax.top_k` gathers the logits of all rows.
    own = jnp.where(ids == token, logits, 0).sum()
    # Tokens of equal logits stand in the order of their ids, as in `top_k`.
    before = (logits > own) | ((logits == own) & (ids < token))
    preceding = jnp.where(before, jax.nn.softmax(logits), 0).sum()
    return (before.sum() < CANDIDATES) & (preceding <= PRECEDING_MASS)


class PairCounts(NamedTuple):
    """Numbers of counted pairs; those of a batch are the sums over its parts.

    pairs:     [P] by draft position.
    labelled:  [P] those whose target has a next token in its own document.
    positions: [] positions of the text, padding too, or anchors.
    """

    pairs: Int[Array, " P"]
    labelled: Int[Array, " P"]
    positions: Int[Array, ""]


def count_pairs(mask: Bool[Array, "P B S"], batch: Batch) -> PairCounts:
    """Count the pairs of `pair_mask`, or of `anchored_mask` for a batch with anchors."""
    # The target of an anchor's pair always has a label.
    labelled = mask
    if batch.anchors is None:
        labelled = mask & labelled_targets(batch.segment_ids)
    return PairCounts(
        pairs=mask.sum(axis=(1, 2)),
        labelled=labelled.sum(axis=(1, 2)),
        # An array, so that the counts of several parts can be stacked and summed.
        positions=jnp.asarray(mask[0].size, jnp.int32),
    )


class CompactTargets(struct.PyTreeNode):
    """The targets that any pair needs, moved to the front of their group of rows.

    The B rows form r groups of consecutive ones, each with n = B S / r flattened target indices. On
    a mesh a group is what one device holds, so that nothing moves between them.

    index: [r, n] flat target index b S + s, b within the group, of each compact slot; the first
        `count` of a group are used.
    rank:  [B, S] the compact slot of each target; meaningless for unused targets.
    count: [r] used targets.
    """

    index: Int[Array, "r n"]
    rank: Int[Array, "B S"]
    count: Int[Array, " r"]


def compact_targets(mask: Bool[Array, "P B S"], groups: int = 1) -> CompactTargets:
    """Collect the targets, or the anchors, that any position needs.

    Example: mask[0] = [[F, T, F, T]] gives index [[1, 3, 0, 0]], rank [[-1, 0, 0, 1]], count [2].
    """
    used = mask.any(axis=0).reshape(groups, -1)
    rank = jnp.cumsum(used, axis=1) - 1
    # `nonzero` needs a fixed size: how many targets are used is known at run time only.
    index = jax.vmap(lambda row: jnp.nonzero(row, size=row.size, fill_value=0)[0])(used)
    return CompactTargets(index=index, rank=rank.reshape(mask.shape[1:]), count=used.sum(axis=1))
