"""The targets of a loss, chunk by chunk: what a chunk reads, and where its gradient goes.

A chunk takes its targets from every group of rows side by side, the compacted ones in order, and
gathers the P states that predict each. For a head that trains at few anchors a chunk holds anchors
instead, and position i has its own targets: those i behind the anchors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.drafters.drafter import Frozen, head_logits
from clover_jax.drafters.registry import DraftHead
from clover_jax.drafters.tokens import to_draft
from clover_jax.models.decoder import project
from clover_jax.training.pairs import CompactTargets


class Terms(NamedTuple):
    """One value for each term of the loss; [P] each where it is for all positions."""

    # Each field's name is also that of its weight in `LossSpec`.
    regression: Array
    soft_ce: Array
    hard_ce: Array
    total_variation: Array
    neg_log_acceptance: Array
    lk: Array
    candidate_ce: Array

    @classmethod
    def alike(cls, value: Array) -> Terms:
        """Return `value` for each of them."""
        return cls(*[value] * len(cls._fields))


class Operands(struct.PyTreeNode):
    """Inputs of the loss that get no gradient; head and chunk are static.

    chunk:       targets of a group that are processed at a time.
    params:      the head's other params (its `logits` may set up all of them).
    states:      [r, n, D] the base's g.
    next_tokens: [r, n] the token that follows each target, in the head's vocabulary; -1 outside.
    mask:        [P, r, m] pairs that count, by target index or by anchor.
    has_next:    [r, n] whether that token belongs to the target's document.
    weight:      [P, r, m] w_i of each pair, likewise.
    divisors:    of each term.
    targets:     those m that any pair needs.
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


class Chunk(struct.PyTreeNode):
    """One position's pairs with c targets of each of r groups.

    Slots beyond the last used one repeat some target, all masked.

    hidden:      [r, c, D] the states whose pairs have these targets.
    states:      [r, c, D] the base's g.
    teacher:     [r, c, Vd] softmax(lm_head g), of the tokens that the head can propose.
    entropy:     [r, c] of the teacher.
    reachable:   [r, c] whether the base's most probable token is one of them.
    next_tokens: [r, c] in the head's vocabulary; -1 outside.
    mask:        [r, c]
    weight:      [r, c]
    has_next:    [r, c]
    """

    hidden: Float[Array, "r c D"]
    states: Float[Array, "r c D"]
    teacher: Float[Array, "r c Vd"]
    entropy: Float[Array, "r c"]
    reachable: Bool[Array, "r c"]
    next_tokens: Int[Array, "r c"]
    mask: Bool[Array, "r c"]
    weight: Float[Array, "r c"]
    has_next: Bool[Array, "r c"]


def num_chunks(operands: Operands) -> Int[Array, ""]:
    """Return the chunks that hold all used targets."""
    # The fullest group decides; other groups' slots are masked in its last chunks.
    return (operands.targets.count.max() + operands.chunk - 1) // operands.chunk


def slots_of_chunks(operands: Operands) -> int:
    """Return the slots that a group's chunks have together, if all targets are used."""
    # Rounded up to whole chunks: `dynamic_update_slice` shifts a slice that exceeds the array.
    return -(-operands.mask.shape[-1] // operands.chunk) * operands.chunk


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

    # The base's most probable token is one of its whole vocabulary, which costs another product.
    config, frozen = operands.head.config, operands.frozen
    reachable = jnp.ones(index.shape, bool)
    if config.draft_to_target is not None:
        reachable = to_draft(config, project(frozen.lm_head, states).argmax(axis=-1)) >= 0

    # Over the tokens that the head can propose: for a reduced vocabulary p is renormalised.
    teacher = jax.nn.softmax(head_logits(config, frozen, states))
    return {
        "states": states,
        "teacher": teacher,
        "entropy": jax.scipy.special.entr(teacher).sum(axis=-1),
        "reachable": reachable,
        "next_tokens": jnp.take_along_axis(operands.next_tokens, index, axis=1),
        "has_next": jnp.take_along_axis(operands.has_next, index, axis=1),
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
