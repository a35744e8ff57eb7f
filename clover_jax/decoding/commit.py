"""The commit stage: write an accepted path to the KV cache and the text; mark finished rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, typed
from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.scores import Scores
from clover_jax.decoding.state import EOS, LENGTH, RUNNING, DecodeState
from clover_jax.decoding.tree import TokenTree
from clover_jax.drafters.drafter import PAD_TOKEN
from clover_jax.models.cache import Cache, gather_rows, ordered_after, write_rows
from clover_jax.sharding.placement import over_rows_and_heads


class StepRecord(struct.PyTreeNode):
    """What one step did, per row; a row that had finished before emits 0.

    accepted: [B] drafted tokens that the verifier accepted, before EOS or the limit cut them.
    emitted:  [B] tokens added to the text.
    proposed: [B] drafted tokens that were verified.
    ranks:    [B, A - 1] of each accepted token, how many of its siblings come before it; the first
        accepted[b] are valid.
    copied:   [B] accepted tokens that were copied from the text; None for trees without copies.
    scores:   of the emitted tokens; None where they are not requested.
    """

    accepted: Int[Array, " B"]
    emitted: Int[Array, " B"]
    proposed: Int[Array, " B"]
    ranks: Int[Array, "B d"]
    copied: Int[Array, " B"] | None = None
    scores: Scores | None = None


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


def commit(
    state: DecodeState,
    tree: TokenTree,
    accepted: Accepted,
    fresh: Cache,
    features: Float[Array, "B T F"],
    by_kernel: bool = False,
) -> tuple[DecodeState, StepRecord]:
    """Append each running row's accepted path and bonus token; finished rows keep their text.

    fresh: keys and values of the tree's slots. features: what the head will read of them.
    by_kernel: as `write_rows` has it.
    Committed positions follow the emitted tokens: length = end - 1 always, so at most
    limit - 1 + A positions of the buffers are ever written.
    """
    # All rows run the same code; an ended row emits 0 tokens.
    running = state.finish == RUNNING
    path_tokens = jnp.take_along_axis(tree.tokens, accepted.path, axis=1)
    # Slot 0 of a path is the root, which the text has already.
    candidates = append_bonus(path_tokens[:, 1:], accepted.count, accepted.bonus)
    emission = cut(candidates, accepted.count + 1, state.limit - state.end, state.eos)
    emitted = jnp.where(running, emission.count, 0)
    # The write must wait for the read. In plain decoding the path is constant, the bonus is not.
    write_at = ordered_after(state.length, accepted.bonus)
    write = functools.partial(write_rows, by_kernel=by_kernel)

    new = state.replace(
        # Beyond the emitted tokens this leaves garbage, which later steps overwrite.
        tokens=write_tokens(state.tokens, candidates, state.length + 1),
        length=state.length + emitted,
        end=state.end + emitted,
        finish=jnp.where(running, emission.finish, state.finish),
        cache=over_rows_and_heads(write, state.cache, gather_rows(fresh, accepted.path), write_at),
        features=jnp.take_along_axis(features, accepted.path[..., None], axis=1).astype(
            state.features.dtype
        ),
        # The head absorbs these positions at the start of the next step, `count` of them.
        next_tokens=candidates,
        count=emitted,
    )
    new = new.replace(tokens=keep_rows(running, new.tokens, state.tokens))
    copied = None
    if tree.copied is not None:
        # Beyond the accepted path lies slot 0, the root, which is no copy.
        on_path = jnp.take_along_axis(tree.copied, accepted.path, axis=1)
        copied = jnp.where(running, on_path.sum(axis=-1), 0)
    return new, StepRecord(
        accepted=jnp.where(running, accepted.count, 0),
        emitted=emitted,
        proposed=jnp.where(running, (tree.tokens[:, 1:] != PAD_TOKEN).sum(axis=-1), 0),
        ranks=sibling_ranks(tree.parent, accepted.path[:, 1:]),
        copied=copied,
    )


@typed
def write_tokens(
    tokens: Int[Array, "B S"], new: Int[Array, "B A"], start: Int[Array, " B"]
) -> Int[Array, "B S"]:
    """Write new tokens at positions start[b] .. start[b] + A - 1 of each row.

    For TPU by comparing positions: a slice that is written becomes a loop over the rows there, 7 us
    for each row of a step (the compiler's estimate for a v6e).

    Example: tokens [[5, 6, 0, 0]], new [[7, 8]] and start [1] give [[5, 7, 8, 0]].
    """
    return jax.lax.platform_dependent(tokens, new, start, tpu=_by_position, default=_by_slice)


def _by_position(tokens: Array, new: Array, start: Array) -> Array:
    place = jnp.arange(tokens.shape[1]) - start[:, None]
    # `new` has few tokens: each costs one comparison with all positions.
    for index in range(new.shape[1]):
        tokens = jnp.where(place == index, new[:, index, None], tokens)
    return tokens


def _by_slice(tokens: Array, new: Array, start: Array) -> Array:
    write = jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice(row, part, (at,)))
    return write(tokens, new, start)


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


def keep_rows(condition: Bool[Array, " B"], new: Array, old: Array) -> Array:
    """Select whole rows: `new` where the condition holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
