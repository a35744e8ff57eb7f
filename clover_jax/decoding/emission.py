"""From an accepted path to the text: its tokens with the bonus, cut at the text's end, written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Int, typed
from clover_jax.decoding.state import EOS, LENGTH, RUNNING


class Emission(struct.PyTreeNode):
    """The tokens of one step that reach the text.

    count:  [B] how many of the candidates.
    finish: [B] RUNNING, EOS or LENGTH.
    """

    count: Int[Array, " B"]
    finish: Int[Array, " B"]


@typed
def cut(
    candidates: Int[Array, "B A"],
    count: Int[Array, " B"],
    room: Int[Array, " B"],
    eos: Int[Array, "B E"],
) -> Emission:
    """Cut `count` candidate tokens after the first EOS and at the room that is left.

    Example: candidates [[4, 2, 9]], count [3], room [8], eos [[2]] emit 2 tokens, finish EOS.
    """
    # An EOS token is emitted, what follows it is not; room counts what may still be emitted.
    slots = jnp.arange(candidates.shape[1])
    ends = (candidates[..., None] == eos[:, None, :]).any(axis=-1) & (slots < count[:, None])
    # Tokens up to and with the first EOS; without an EOS, more than there are candidates.
    first_end = jnp.where(ends, slots, candidates.shape[1]).min(axis=-1) + 1
    emitted = jnp.minimum(jnp.minimum(count, first_end), room)
    # Where an EOS takes the last free place, the reason is EOS, not LENGTH.
    finish = jnp.where(emitted == room, LENGTH, RUNNING)
    finish = jnp.where(first_end <= emitted, EOS, finish)
    return Emission(count=emitted, finish=finish)


@typed
def write_tokens(
    tokens: Int[Array, "B S"], new: Int[Array, "B A"], start: Int[Array, " B"]
) -> Int[Array, "B S"]:
    """Write new tokens at positions start[b] .. start[b] + A - 1 of each row.

    For TPU by comparing positions: a slice that is written becomes a loop over the rows there, 7 us
    for each row of a step (the compiler's estimate for a v6e).

    Example: tokens [[5, 6, 0, 0]], new [[7, 8]] and start [1] give [[5, 7, 8, 0]].
    """
    by_slice = jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice(row, part, (at,)))
    return jax.lax.platform_dependent(tokens, new, start, tpu=_by_position, default=by_slice)


def _by_position(tokens: Array, new: Array, start: Array) -> Array:
    place = jnp.arange(tokens.shape[1]) - start[:, None]
    # `new` has few tokens: each costs one comparison with all positions.
    for index in range(new.shape[1]):
        tokens = jnp.where(place == index, new[:, index, None], tokens)
    return tokens


@typed
def sibling_ranks(parent: Int[Array, "r T"], slots: Int[Array, "B d"]) -> Int[Array, "B d"]:
    """Return how many siblings of each slot come before it in the tree; r is B or 1.

    Example: parent [[-1, 0, 0, 1, 0]] and slots [[4, 3, 2]] give [[2, 0, 1]].
    """
    parent = jnp.broadcast_to(parent, (slots.shape[0], parent.shape[1]))
    mine = jnp.take_along_axis(parent, slots, axis=1)
    # Siblings of a slot have its parent; slots lie in the order of ranks.
    before = jnp.arange(parent.shape[1]) < slots[..., None]
    return ((parent[:, None] == mine[..., None]) & before).sum(axis=-1)


@typed
def append_bonus(
    drafted: Int[Array, "B d"], count: Int[Array, " B"], bonus: Int[Array, " B"]
) -> Int[Array, "B A"]:
    """Put the bonus token right after the first `count` drafted tokens; the rest is garbage.

    Example: drafted [[7, 8, 0]], count [2], bonus [4] gives [[7, 8, 4, 4]].
    """
    slots = jnp.arange(drafted.shape[1] + 1)
    # Room for a bonus behind a path of full depth.
    padded = jnp.pad(drafted, ((0, 0), (0, 1)))
    return jnp.where(slots < count[:, None], padded, bonus[:, None])
