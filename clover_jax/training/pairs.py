"""Which (position of the head, position of the text) pairs count, and the chunks a loss reads.

Position i of the head at t predicts x_{t+2+i}; its target state is the base's g at t+1+i. Here
pairs are named by their *target index* s = t+1+i instead of t: then the P pairs that share a
target state, and so the teacher's softmax, lie in one column. A head that trains at sampled anchors
(DFlash 2) has pairs named by anchor instead, and position i has its own targets, i after the
anchors.

The targets that any pair needs are compacted to the front of their group of rows. A chunk takes the
next of them from every group side by side, and gathers the P states that predict each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.config import DrafterConfig
from clover_jax.drafters.drafter import Frozen, head_logits
from clover_jax.drafters.registry import DraftHead
from clover_jax.drafters.tokens import to_draft
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project


def counted_pairs(batch: Batch, head: DrafterConfig) -> Bool[Array, "P B S"]:
    """Return the pairs of `anchored_mask` [P, B, M] for a batch with anchors, else `pair_mask`."""
    if batch.anchors is not None:
        return anchored_mask(batch, batch.anchors, head.num_positions)
    convention = head.loss.pairs
    return pair_mask(batch.segment_ids, batch.loss_mask, head.num_positions, convention)


def pair_mask(
    segment_ids: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    num_positions: int,
    convention: str = "decoding",
) -> Bool[Array, "P B S"]:
    """Return [i, b, s] True where the pair (t, i) counts, t = s - 1 - i, of one document with s.

    "decoding": x_{t+1}, the last token emitted, to x_{s+1}, the one drafted, are of one answer:
        m_{t+1} .. m_{s+1} are set. So the first pair of an answer is that of the prompt's last
        position, and its last drafts the end-of-text token.
    "release": m_{s-1} is set, as m_{t+i} in the code of Clover-2 and EAGLE. It begins one position
        later, has pairs of the prompt's last positions, and one behind the end of the answer.

    Example: segment_ids [[1, 1, 1, 1, 2]], loss_mask [[F, T, T, T, F]] and P = 2 give
    [[F, T, T, F, F]] and [[F, F, T, F, F]]; "release" [[F, F, T, T, F]] and [[F, F, T, T, F]].
    """
    # Both are unset where the row has no such token.
    before, after = shift_right(loss_mask, 1), jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    counted = before if convention == "release" else after & labeled_targets(segment_ids)

    masks = []
    for i in range(num_positions):
        if convention == "decoding":
            counted = counted & shift_right(loss_mask, i)
        source = shift_right(segment_ids, i + 1)
        # Segment 0 is padding.
        masks.append(counted & (source == segment_ids) & (segment_ids > 0))
    return jnp.stack(masks)


def sample_anchors(key: Array, batch: Batch, count: int) -> Int[Array, "B M"]:
    """Return places of x_{t+1}, drawn again at each step, for heads that train at few of them.

    An anchor is a supervised token that another token of its document follows. A row with fewer
    than `count` of them is filled up with its last place, at which no pair counts.
    """
    size = batch.tokens.shape[1]
    is_possible = batch.loss_mask & labeled_targets(batch.segment_ids)
    # The largest of random numbers give a sample without repeats.
    order = jnp.where(is_possible, jax.random.uniform(key, batch.tokens.shape), -1.0)
    value, anchors = jax.lax.top_k(order, min(count, size))
    return jnp.where(value < 0, size - 1, anchors)


def anchored_mask(
    batch: Batch, anchors: Int[Array, "B M"], num_positions: int
) -> Bool[Array, "P B M"]:
    """Return [i, b, m] True where position i of the block at an anchor counts.

    It does when its target token, x_{t+2+i}, is supervised and of the anchor's document.

    Example: segment_ids [[1, 1, 1, 2]], loss_mask all True and anchors [[0, 1]] give, for P = 2,
    [[T, T]] and [[T, F]].
    """
    size = batch.tokens.shape[1]

    def at(x: Array, further: int) -> Array:
        index = jnp.clip(anchors + further, 0, size - 1)
        return jnp.take_along_axis(x, index, axis=1)

    masks = []
    segment = at(batch.segment_ids, 0)
    for i in range(num_positions):
        # `at` clips places beyond the row, which `is_inside` then masks.
        is_inside = (anchors + i + 1 < size) & (at(batch.segment_ids, i + 1) == segment)
        masks.append(at(batch.loss_mask, i + 1) & is_inside & (segment > 0))
    return jnp.stack(masks)


def labeled_targets(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Return [b, s] True where x_{s+1}, the label at s, is of the same document.

    Example: segment_ids [[1, 1, 2, 0]] give [[T, F, F, F]].
    """
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (following == segment_ids) & (segment_ids > 0)


def shift_right(x: Array, by: int) -> Array:
    """Slot s of [B, S] gets x[s - by], 0 before the start: [[5, 6, 7]] by 1 is [[0, 5, 6]]."""
    size = x.shape[1]
    return jnp.pad(x, ((0, 0), (by, 0)))[:, :size]


class PairCounts(NamedTuple):
    """Numbers of counted pairs; a batch has the sums over its parts.

    pairs:     [P] by draft position.
    labeled:  [P] the pairs whose target has a next token in its own document.
    positions: [] positions of the text, padding too, or anchors.
    """

    pairs: Int[Array, " P"]
    labeled: Int[Array, " P"]
    positions: Int[Array, ""]


def count_pairs(mask: Bool[Array, "P B S"], batch: Batch) -> PairCounts:
    """Count the pairs of `pair_mask`, or of `anchored_mask` for a batch with anchors."""
    # The target of an anchor's pair always has a label.
    by_text = batch.anchors is None
    labeled = mask & labeled_targets(batch.segment_ids) if by_text else mask
    return PairCounts(
        pairs=mask.sum(axis=(1, 2)),
        labeled=labeled.sum(axis=(1, 2)),
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


class Terms(NamedTuple):
    """One value for each term of the loss (`losses.py`); [P] each where it is for all positions."""

    # Each field's name is also that of its weight in `LossSpec`.
    regression: Array
    soft_ce: Array
    hard_ce: Array
    total_variation: Array
    candidate_ce: Array

    @classmethod
    def alike(cls, value: Array) -> Terms:
        return cls(*[value] * len(cls._fields))


class Operands(struct.PyTreeNode):
    """Inputs of the loss that get no gradient; head and chunk are static.

    chunk:       targets of a group that are processed at a time.
    params:      the head's other params (its `logits` may set up all of them).
    states:      [r, n, D] the base's g.
    next_tokens: [r, n] the token that follows each target, in the head's vocabulary; -1 outside.
    mask:        [P, r, m] pairs that count, by target index or by anchor.
    has_next:    [r, n] whether that token belongs to the target's document.
    weight:      [P, r, m] w_i of each pair.
    divisors:    of each term.
    targets:     the targets or anchors that any pair needs.
    anchors:     [r, m] flat place of each anchor, which is the target of its position 0; None for a
        head that trains at all positions.
    """

    head: DraftHead = struct.field(pytree_node=False)
    chunk: int = struct.field(pytree_node=False)
    params: Params
    frozen: Frozen
    states: Float[Array, "r n D"]
    next_tokens: Int[Array, "r n"]
    mask: Bool[Array, "P r m"]
    has_next: Bool[Array, "r n"]
    weight: Float[Array, "P r m"]
    divisors: Terms
    targets: CompactTargets
    anchors: Int[Array, "r m"] | None = None

    @property
    def num_chunks(self) -> Int[Array, ""]:
        """Chunks that hold all used targets."""
        # The fullest group decides; other groups' slots are masked in its last chunks.
        return (self.targets.count.max() + self.chunk - 1) // self.chunk

    @property
    def num_slots(self) -> int:
        """Slots that a group's chunks have together, if all targets are used."""
        # Rounded up to whole chunks: `dynamic_update_slice` shifts a slice that exceeds the array.
        return -(-self.mask.shape[-1] // self.chunk) * self.chunk


class Chunk(struct.PyTreeNode):
    """One position's pairs with c targets of each of r groups.

    Slots beyond the last used one repeat some target, all masked.

    hidden:      [r, c, D] the states whose pairs have these targets.
    states:      [r, c, D] the base's g.
    teacher:     [r, c, Vd] softmax(lm_head g), of the tokens that the head can propose.
    proposable:  [r, c] whether the head can propose the text's next token, or the base's best.
    next_tokens: [r, c] in the head's vocabulary; -1 outside.
    mask:        [r, c]
    weight:      [r, c]
    has_next:    [r, c]
    """

    hidden: Float[Array, "r c D"]
    states: Float[Array, "r c D"]
    teacher: Float[Array, "r c Vd"]
    proposable: Bool[Array, "r c"]
    next_tokens: Int[Array, "r c"]
    mask: Bool[Array, "r c"]
    weight: Float[Array, "r c"]
    has_next: Bool[Array, "r c"]


def take_chunks(hidden: Array, operands: Operands, number: Array) -> Iterator[Chunk]:
    """Gather chunk `number`: for each of the P positions, in turn, its states and their targets."""
    # The same slots in every group; a group with fewer targets has some of them masked.
    slots = number * operands.chunk + jnp.arange(operands.chunk)
    # The last chunk may go beyond the last slot, which it then repeats; `used` masks that out.
    index = jnp.take(operands.targets.index, slots, axis=1, mode="clip")
    used = slots < operands.targets.count[:, None]

    def of_pairs(x: Array) -> Array:
        return jnp.take_along_axis(x, index, axis=1)

    # [P, r, n, D]: the rows of a group are flattened, as in the operands.
    flat = hidden.reshape(len(hidden), len(index), -1, hidden.shape[-1])
    targets = {}
    for i, states in enumerate(flat):
        if operands.anchors is not None:
            source = index
            targets = _take_targets(operands, of_pairs(operands.anchors) + i)
        else:
            # A counted pair's source lies i + 1 before its target in the same row; others are
            # masked. All positions share the targets, and so the teacher's softmax.
            source = index - 1 - i
            targets = targets or _take_targets(operands, index)
        yield Chunk(
            hidden=_take_rows(states, source),
            mask=of_pairs(operands.mask[i]) & used,
            weight=of_pairs(operands.weight[i]),
            **targets,
        )


def _take_targets(operands: Operands, index: Int[Array, "r c"]) -> dict[str, Array]:
    """Return a chunk's fields for its targets; an index beyond the last gives some target."""
    index = jnp.minimum(index, operands.states.shape[1] - 1)
    states = _take_rows(operands.states, index)

    config, frozen = operands.head.config, operands.frozen
    next_tokens = jnp.take_along_axis(operands.next_tokens, index, axis=1)
    has_next = jnp.take_along_axis(operands.has_next, index, axis=1)
    # Where the text ends, nothing speaks against the pair.
    proposable = ~has_next | (next_tokens >= 0)
    if config.loss.proposable == "base" and config.draft_to_target is not None:
        # A product with the whole vocabulary: for Gemma 3 270M two thirds of what a step computes.
        best = project(frozen.lm_head, states).argmax(axis=-1)
        proposable = to_draft(config, best) >= 0

    # Over the tokens that the head can propose: for a reduced vocabulary p is renormalized.
    teacher = jax.nn.softmax(head_logits(config, frozen, states))
    return {
        "states": states,
        "teacher": teacher,
        "proposable": proposable,
        "next_tokens": next_tokens,
        "has_next": has_next,
    }


def _take_rows(states: Float[Array, "r n D"], index: Int[Array, "r c"]) -> Float[Array, "r c D"]:
    """Gather rows of each group; an index before the first gives the first."""
    return jnp.take_along_axis(states, jnp.maximum(index, 0)[..., None], axis=1)


def to_sources(by_slot: Array, operands: Operands, shape: tuple[int, ...]) -> Array:
    """Bring a gradient by compact slot back to [P, B, S, D], by gathers (a scatter is slow)."""
    num_positions, rows, size, width = shape
    groups = by_slot.shape[1]
    mask = operands.mask.reshape(shape[:-1])

    gradients = []
    for i in range(num_positions):
        # Position t of the result belongs to target t + 1 + i, an anchor's to the anchor.
        shift = i + 1 if operands.anchors is None else 0
        by_target = jnp.where(mask[i], operands.targets.rank, -1)
        slot = jnp.pad(by_target, ((0, 0), (0, shift)), constant_values=-1)[:, -size:]
        # A slot of -1 reads some gradient, which is then left out.
        by_source = _take_rows(by_slot[i], slot.reshape(groups, -1)).reshape(rows, size, width)
        gradients.append(jnp.where(slot[..., None] >= 0, by_source, 0))
    return jnp.stack(gradients)
