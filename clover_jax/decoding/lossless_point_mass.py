"""Lossless acceptance of deterministic children: one draw per node that the text reaches.

A child chosen without a draw has a point mass as q. Testing such children one after another accepts
child x with probability p(x) in all, and leaves the bonus the rest of p: that is a single draw from
p. If the drawn token is one of the node's children the walk goes on there, else it is the bonus.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.sampling import RowSampling, draw, warp
from clover_jax.decoding.tree import TokenTree


@struct.dataclass
class _Walk:
    """Where a row stands: its slot, how many nodes it has accepted, whether it still descends."""

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
    depth: int,
) -> Accepted:
    """Walk from the root, drawing the next token at each node that is reached.

    logits: the base's, at every slot; only the depth + 1 visited ones of a row are warped, since
        top-p sorts a vocabulary. length: position of the root. depth: bound of the tree's height.
    """
    batch = length.shape[0]
    each, zeros = jnp.arange(batch), jnp.zeros(batch, jnp.int32)

    def visit(walk: _Walk, level: Int[Array, ""]) -> tuple[_Walk, Int[Array, " B"]]:
        warped = warp(logits[each, walk.slot][:, None], rows, truncate)[:, 0]
        token = draw(warped, rows, length + 1 + level)
        child = (tree.parent == walk.slot[:, None]) & (tree.tokens == token[:, None])
        descends = walk.descends & child.any(axis=-1)
        slot = jnp.where(descends, jnp.argmax(child, axis=-1).astype(jnp.int32), walk.slot)
        bonus = jnp.where(walk.descends, token, walk.bonus)
        return _Walk(slot, walk.count + descends, descends, bonus), jnp.where(descends, slot, 0)

    start = _Walk(slot=zeros, count=zeros, descends=jnp.ones(batch, bool), bonus=zeros)
    end, below = jax.lax.scan(visit, start, jnp.arange(depth + 1))
    path = jnp.concatenate([zeros[:, None], below[:-1].T], axis=1)
    return Accepted(path=path, count=end.count, bonus=end.bonus)
