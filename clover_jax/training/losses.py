"""The distillation loss of any drafter, in chunks of targets.

Over the pairs (t, i) that count (`pairs.py`):

    loss = sum_i w_i (regression R_i + soft_ce S_i + hard_ce H_i + total_variation V_i
                      + candidate_ce C_i)

With u = hidden[i, t], g the base's final state at the target index t+1+i, p = softmax(lm_head g)
and q = softmax(logits(u)):

    R_i = SmoothL1(u, g) averaged over D            regression
    S_i = - sum_v p(v) log q(v)                     soft_ce, soft cross-entropy
    H_i = - log q(x_{t+2+i})                        hard_ce, hard cross-entropy
    V_i = sum_v |p(v) - q(v)| / 2                   total_variation
    C_i = - log q'(x_{t+2+i})                       candidate_ce, q' over the rescored candidates

V is how often lossless verification rejects a token that was drawn from q. Where p and q hardly
overlap its gradient vanishes; S leads there, and weighs less as they come together. C is 0 for a
pair whose true token is not a candidate. For a head that does not rescore, C is H.

Each term is summed over the batch and divided by (counted pairs of position i) + `divisor_offset`,
which is 1 in Clover-2's release; or by all positions of the batch, as in EAGLE-3; or by the sum of
w_i over all counted pairs, as in DFlash 2. H and C count the pairs whose target has a next token in
its own document; a document's last target has none. C averages over pairs whose true token is one
of the candidates: its divisor is multiplied by the weighted share of such pairs in the batch (or in
a part of it, with gradient accumulation), which an extra pass over all logits computes.

w_i is decay^i, or with `dpace` the effect of the position on the accepted length (D-PACE):
w_i = sum_{m >= i} prod_{j <= m} ((1 - a) q_j + a) over the pairs (t, j) that count, q_j the head's
probability of x_{t+2+j} (0 outside of a reduced vocabulary), a = `dpace`, no gradient through w. w
needs all positions of t. It scales each pair's gradient by `hidden` after the loop over chunks; for
a head that learns output matrices of its own or rescores, logits are computed twice instead, once
for w and once for the loss.

A head with a reduced vocabulary is compared with p restricted to it and renormalized. A pair whose
true token lies outside (EAGLE-3: whose most probable token of the base does, `proposable`) has
S_i = V_i = H_i = 0 but stays in the divisor: any proposal is rejected there. It is a miss in the
accuracy, which compares the best tokens of p and q. R_i counts everywhere.

No [P, B, S, V] array exists: targets are processed in chunks, the teacher's softmax of a chunk is
computed once for all P positions, and the gradient is taken inside the chunk, so that no logits
outlive it. Targets that no pair needs are left out: the number of chunks follows the masks. The
rows may form r groups (`pairs.CompactTargets`); a chunk then takes its targets from all of them
side by side, and where each device of a mesh holds one group, no state leaves its device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.config import LossSpec
from clover_jax.drafters.drafter import Frozen
from clover_jax.drafters.registry import DraftHead
from clover_jax.drafters.tokens import to_draft
from clover_jax.models.batch import Batch
from clover_jax.training.pairs import (
    Chunk,
    Operands,
    PairCounts,
    Terms,
    compact_targets,
    count_pairs,
    counted_pairs,
    labeled_targets,
    shift_right,
    take_chunks,
    to_sources,
)

DEFAULT_CHUNK = 512  # targets; the largest temporary is [chunk, V]


class LossMetrics(struct.PyTreeNode):
    """Per draft position, [P] each.

    terms: R_i, S_i, H_i, V_i and C_i, unweighted.
    accuracy: share of counted pairs where the head's most probable token is the base's.
    pairs: counted pairs.

    Where each part of a batch was given the whole batch's `counts`, the sum of the parts' metrics
    is that of the batch.
    """

    terms: Terms
    accuracy: Float[Array, " P"]
    pairs: Int[Array, " P"]


class _Sums(NamedTuple):
    """Sums over counted pairs: [r] of one position in the loop, then [P, r]; [P] over all groups.

    loss: of the weighted terms; terms: unweighted.
    """

    loss: Array
    terms: Terms
    hits: Array


class _Carry(NamedTuple):
    """What the loop over chunks builds up, for each group by itself.

    A sum over the groups within the loop would make every chunk wait for all devices of a mesh and
    send them whole matrices.

    pairs: [P, r, slots, 2] loss and D-PACE's factor of each pair, by compact slot, which is the
        target's number among those in use.
    d_hidden: [P, r, slots, D] gradient by compact slot.
    d_owned:  gradient of the head's own output matrices, [r, ...] each.
    """

    sums: _Sums
    pairs: Array
    d_hidden: Array
    d_owned: Params


def distillation_loss(
    head: DraftHead,
    params: Params,
    frozen: Frozen,
    hidden: Float[Array, "P B S D"],
    target_states: Float[Array, "B S D"],
    batch: Batch,
    chunk: int = DEFAULT_CHUNK,
    groups: int = 1,
    counts: PairCounts | None = None,
) -> tuple[Float[Array, ""], LossMetrics]:
    """Return the loss and its parts; differentiable by `params` and `hidden` only.

    params: the head's; only those that its module names in `output_params` get a gradient here,
        the rest get theirs through `hidden`.
    hidden: u^i_t of `train_forward`, [P, B, M, D] for a batch with anchors; columns beyond D, which
        only the head's logits read, take no part in the regression.
    target_states: the base's g. Neither they nor `frozen` receive a gradient.
    chunk: targets per chunk and group. groups: r, which divides B; it changes no value.
    counts: of the batch that this one is a part of; None where it is the whole.
    """
    num_positions = len(hidden)
    mask = counted_pairs(batch, head.config)
    # A part divides by the pairs of its whole batch, so that the parts sum up to the batch's loss.
    own = count_pairs(mask, batch)
    whole = own if counts is None else counts
    divisors = _divisors(head.config.loss, whole)

    # Params that get a gradient here stay outside of the operands, which get none.
    owned = {name: params[name] for name in head.module.output_params}
    others = {name: leaf for name, leaf in params.items() if name not in owned}
    # Decay^i for every pair of position i.
    by_position = head.config.loss.decay ** jnp.arange(num_positions)
    weight = jnp.broadcast_to(by_position[:, None, None], mask.shape)
    # Rows go into groups here and nowhere else: [B, S] becomes [r, n].
    operands = Operands(
        head=head,
        # No chunk is larger than a group.
        chunk=min(chunk, mask.size // (num_positions * groups)),
        params=others,
        frozen=frozen,
        states=target_states.reshape(groups, -1, target_states.shape[-1]),
        # The last place of a row wraps around to its first token; `has_next` masks it.
        next_tokens=to_draft(head.config, jnp.roll(batch.tokens, -1, axis=1)).reshape(groups, -1),
        mask=mask.reshape(num_positions, groups, -1),
        has_next=labeled_targets(batch.segment_ids).reshape(groups, -1),
        weight=weight.reshape(num_positions, groups, -1),
        divisors=divisors,
        targets=compact_targets(mask, groups),
    )
    if batch.anchors is not None:
        # Each anchor's place among the flattened rows of its group, as in `CompactTargets.index`.
        rows = len(batch.anchors)
        row = jnp.arange(rows) % (rows // groups)
        places = batch.tokens.shape[1] * row[:, None] + batch.anchors
        operands = operands.replace(anchors=places.reshape(groups, -1))
    loss, sums = _chunked_loss(owned, hidden, jax.lax.stop_gradient(operands))

    # Unweighted, so that terms compare between runs of other weights.
    means = jax.tree.map(jnp.divide, sums.terms, divisors)
    # A part without a single pair has an accuracy of 0 rather than NaN.
    accuracy = sums.hits / jnp.maximum(whole.pairs, 1)
    return loss, LossMetrics(means, accuracy, own.pairs)


def _divisors(spec: LossSpec, counts: PairCounts) -> Terms:
    """Return what each term's sum is divided by, [P] each."""
    # EAGLE-3 divides all terms alike; else each divides by the pairs that it counts.
    if spec.divisor == "positions":
        counted = Terms.alike(jnp.broadcast_to(counts.positions, counts.pairs.shape))
    else:
        labeled = {"hard_ce": counts.labeled, "candidate_ce": counts.labeled}
        counted = Terms.alike(counts.pairs)._replace(**labeled)
    # DFlash 2: one divisor for all positions, the sum of w_i over all counted pairs.
    if spec.divisor == "weights":
        decay = spec.decay ** jnp.arange(len(counts.pairs))
        counted = jax.tree.map(
            lambda count: jnp.broadcast_to((decay * count).sum(), count.shape), counted
        )
    return jax.tree.map(lambda count: count + spec.divisor_offset, counted)


@jax.custom_vjp
def _chunked_loss(owned: Params, hidden: Array, operands: Operands) -> tuple[Array, _Sums]:
    """Return the loss and its sums over all groups; the gradient comes from the same pass."""
    # Without a use of the gradient the compiler leaves its computation out of the loop.
    return _value_and_gradient(owned, hidden, operands)[0]


def _value_and_gradient(
    owned: Params, hidden: Array, operands: Operands
) -> tuple[tuple[Array, _Sums], tuple[Params, Array]]:
    """Return value and gradient of `_chunked_loss`, both taken within each chunk."""
    head, num_positions, width = operands.head, hidden.shape[0], hidden.shape[-1]
    groups, spec = operands.states.shape[0], head.config.loss
    by_candidates = spec.candidate_ce > 0 and head.module.rescores
    # D-PACE's weights scale the gradient of each pair. Where pairs are summed up within the loop,
    # what needs all positions or all pairs together is computed in a pass of its own before.
    weighs_after = spec.dpace > 0 and not owned and not by_candidates
    if weighs_after:
        operands = operands.replace(weight=jnp.ones_like(operands.weight))
    elif spec.dpace:
        operands = operands.replace(weight=_dpace_before(owned, hidden, operands))
    if by_candidates:
        # An anchored pair always has a true token.
        by_text = operands.anchors is None
        labeled = operands.mask & operands.has_next if by_text else operands.mask
        whole = jnp.where(labeled, operands.weight, 0).sum()
        covered = _of_pairs(_candidate_weight, owned, hidden, operands).sum()
        # Without a covered pair the sum of the term is 0 as well, for any divisor.
        share = jnp.where(covered > 0, covered, 1.0) / jnp.where(covered > 0, whole, 1.0)
        divisors = operands.divisors
        scaled = divisors._replace(candidate_ce=divisors.candidate_ce * share)
        operands = operands.replace(divisors=scaled)

    differentiate = jax.grad(_position_loss, argnums=(2, 3), has_aux=True)  # owned, u

    def body(number: Array, carry: _Carry) -> _Carry:
        # Position by position: sums and d_hidden are stacked, d_owned is added up.
        parts, pairs, gradients, d_owned = [], [], [], carry.d_owned
        by_position = _by_position(differentiate, owned, hidden, operands, number)
        for (d_mine, d_hidden), (sums, of_pairs) in by_position:
            parts.append(sums)
            pairs.append(of_pairs)
            gradients.append(d_hidden)
            d_owned = jax.tree.map(lambda s, d: s + d.astype(s.dtype), d_owned, d_mine)

        sums, first = jax.tree.map(lambda *x: jnp.stack(x), *parts), number * operands.chunk
        return _Carry(
            sums=jax.tree.map(jnp.add, carry.sums, sums),
            pairs=_with_chunk(carry.pairs, pairs, first),
            d_hidden=_with_chunk(carry.d_hidden, gradients, first),
            d_owned=d_owned,
        )

    # Slots of chunks that never run stay 0, and no pair that counts has one of them.
    zeros = jnp.zeros((num_positions, groups))
    slots = (num_positions, groups, operands.num_slots)
    start = _Carry(
        sums=_Sums(zeros, Terms.alike(zeros), zeros),
        pairs=jnp.zeros((*slots, 2)),
        d_hidden=jnp.zeros((*slots, width), hidden.dtype),
        # In float32: a sum over many chunks in bfloat16 loses what single chunks bring.
        d_owned=jax.tree.map(lambda w: jnp.zeros((groups, *w.shape), jnp.float32), owned),
    )
    end = jax.lax.fori_loop(0, operands.num_chunks, body, start)

    # Only now do groups, and so devices, meet.
    sums = jax.tree.map(lambda of_each: of_each.sum(axis=-1), end.sums)
    d_owned = jax.tree.map(lambda d, w: d.sum(axis=0).astype(w.dtype), end.d_owned, owned)
    d_hidden = to_sources(end.d_hidden, operands, hidden.shape)
    loss = sums.loss.sum()
    if weighs_after:
        pairs = to_sources(end.pairs, operands, (*hidden.shape[:-1], 2))
        weight = _dpace_weights(pairs[..., 1])
        loss = (weight * pairs[..., 0]).sum()
        d_hidden = (weight[..., None] * d_hidden).astype(hidden.dtype)
    return (loss, sums), (d_owned, d_hidden)


def _dpace_before(owned: Params, hidden: Array, operands: Operands) -> Float[Array, "P r n"]:
    """Return D-PACE's w_i of every pair, by target index or by anchor, in an extra pass."""

    def factor(
        position: int, operands: Operands, owned: Params, u: Array, chunk: Chunk
    ) -> Float[Array, " c"]:
        # The compiler drops all other terms.
        terms, _ = _pair_terms(position, operands, owned, u, chunk)
        return _dpace_factor(terms, operands, chunk)

    factors = _of_pairs(factor, owned, hidden, operands)[..., None]
    weights = _dpace_weights(to_sources(factors, operands, (*hidden.shape[:-1], 1))[..., 0])
    # Back from the source's column to the target's.
    if operands.anchors is None:
        weights = jnp.stack([shift_right(each, i + 1) for i, each in enumerate(weights)])
    return weights.reshape(operands.mask.shape)


def _dpace_weights(factor: Float[Array, "P B S"]) -> Float[Array, "P B S"]:
    """Return w_i by source, where all positions of a t lie in one column.

    factor: (1 - a) q_i + a, or 0 where a pair does not count.
    """
    is_counted = factor > 0
    # A pair that does not count is left out of the products and of the sum over m >= i.
    reached = jnp.where(is_counted, jnp.cumprod(jnp.where(is_counted, factor, 1), axis=0), 0)
    return jax.lax.cumsum(reached, axis=0, reverse=True)


def _of_pairs(
    function: Callable[..., Float[Array, " c"]], owned: Params, hidden: Array, operands: Operands
) -> Float[Array, "P r s"]:
    """Return `function` of every pair, by compact slot, in an extra pass over all chunks."""

    def body(number: Array, by_slot: Array) -> Array:
        by_position = _by_position(function, owned, hidden, operands, number)
        return _with_chunk(by_slot, list(by_position), number * operands.chunk)

    zeros = jnp.zeros((*operands.mask.shape[:2], operands.num_slots))
    return jax.lax.fori_loop(0, operands.num_chunks, body, zeros)


def _by_position(
    function: Callable[..., Any], owned: Params, hidden: Array, operands: Operands, number: Array
) -> Iterator[Any]:
    """Yield `function` of chunk `number`, [r, ...], for one position after the other."""
    # So of the head's logits only one [c, V] is live at a time.
    for i, chunk in enumerate(take_chunks(hidden, operands, number)):
        of_group = functools.partial(function, i, operands)
        yield jax.vmap(of_group, in_axes=(None, 0, 0))(owned, chunk.hidden, chunk)


def _with_chunk(by_slot: Array, chunk: list[Array], start: Array) -> Array:
    """Write a chunk's values, one array a position, to compact slots from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(by_slot, jnp.stack(chunk), start, axis=2)


def _dpace_factor(terms: Terms, operands: Operands, chunk: Chunk) -> Float[Array, " c"]:
    """Return (1 - a) q_i + a of a group's chunk."""
    # q is 0 where the text has no next token, or the head not its id.
    q = jnp.where(_is_labeled(chunk), jnp.exp(-terms.hard_ce), 0.0)
    least = operands.head.config.loss.dpace
    return (1 - least) * q + least


def _candidate_weight(
    position: int, operands: Operands, owned: Params, u: Array, chunk: Chunk
) -> Float[Array, " c"]:
    """Return w_i where the true token is one of the head's candidates, else 0."""
    _, scores = _logits_and_scores(position, operands, owned, u)
    is_candidate = chunk.mask & _is_labeled(chunk) & jnp.isfinite(_of_next_token(scores, chunk))
    return jnp.where(is_candidate, chunk.weight, 0.0)


def _scale_gradient(
    gradients: tuple[Params, Array], cotangents: tuple
) -> tuple[Params, Array, None]:
    """Chain with the cotangent of the loss; that of the metrics is dropped."""
    by_loss = cotangents[0]
    d_owned, d_hidden = jax.tree.map(lambda x: (x * by_loss).astype(x.dtype), gradients)
    return d_owned, d_hidden, None


_chunked_loss.defvjp(_value_and_gradient, _scale_gradient)


def _position_loss(
    position: int, operands: Operands, owned: Params, u: Array, chunk: Chunk
) -> tuple[Array, tuple[_Sums, Float[Array, "c 2"]]]:
    """Return a position's weighted loss over a group's chunk, its sums, and `_Carry.pairs`."""
    terms, hits = _pair_terms(position, operands, owned, u, chunk)
    weights = [getattr(operands.head.config.loss, name) for name in Terms._fields]

    # Divided here and not at the end: gradients of all positions add up in the chunk's loop.
    parts = [
        weight / divisor[position] * chunk.weight * term
        for weight, divisor, term in zip(weights, operands.divisors, terms, strict=True)
        if weight  # a term of weight 0 costs no gradient
    ]
    losses = sum(parts, jnp.zeros_like(chunk.weight))
    loss = losses.sum()
    sums = _Sums(loss, jax.tree.map(jnp.sum, terms), hits.astype(loss.dtype).sum())
    # These are reported or weigh, and are not trained on.
    of_pairs = jnp.stack([losses, _dpace_factor(terms, operands, chunk)], axis=-1)
    return loss, jax.lax.stop_gradient((sums, of_pairs))


def _pair_terms(
    position: int, operands: Operands, owned: Params, u: Array, chunk: Chunk
) -> tuple[Terms, Bool[Array, " c"]]:
    """Return the terms of a group's chunk, [c] each, and the hits; 0 where one does not count."""
    logits, scores = _logits_and_scores(position, operands, owned, u)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    cross_entropy = log_total - (chunk.teacher * logits).sum(axis=-1)

    # Where several tokens tie for the base's best, proposing any of them is a hit.
    is_best = chunk.teacher >= chunk.teacher.max(axis=-1, keepdims=True)
    # 1 - sum_v min(p, q) would round to 0 where p and q are nearly the same.
    probability = jnp.exp(logits - log_total[..., None])
    rejection = 0.5 * jnp.abs(chunk.teacher - probability).sum(axis=-1)

    # The targets of the chunk that each term counts; see the module's docstring.
    mask, of_next = chunk.mask, _of_next_token(scores, chunk)
    labeled = mask & _is_labeled(chunk)
    in_reach = mask & chunk.proposable

    # SmoothL1, Huber's loss with beta 1: d^2 / 2 where |d| < 1, else |d| - 1/2. Of the columns of u
    # that predict a state; in float32, since squares in bfloat16 would lose small distances.
    predicted = u[..., : chunk.states.shape[-1]].astype(jnp.float32)
    distance = jnp.abs(predicted - chunk.states.astype(jnp.float32))
    smooth = jnp.where(distance < 1, 0.5 * distance * distance, distance - 0.5).mean(axis=-1)

    terms = Terms(
        regression=jnp.where(mask, smooth, 0.0),
        soft_ce=jnp.where(in_reach, cross_entropy, 0.0),
        hard_ce=jnp.where(labeled, log_total - _of_next_token(logits, chunk), 0.0),
        total_variation=jnp.where(in_reach, rejection, 0.0),
        candidate_ce=jnp.where(
            labeled & jnp.isfinite(of_next), jax.nn.logsumexp(scores, axis=-1) - of_next, 0.0
        ),
    )
    # By the scores after `rescore`, since decoding proposes by those.
    hits = jnp.where(is_best, scores, -jnp.inf).max(axis=-1) >= scores.max(axis=-1)
    return terms, in_reach & hits


def _logits_and_scores(
    position: int, operands: Operands, owned: Params, u: Array
) -> tuple[Float[Array, "c Vd"], Float[Array, "c Vd"]]:
    """Return a head's logits, and its candidates' scores after `rescore`, -inf for others."""
    params = {**operands.params, **owned}
    logits = operands.head.apply(params, "logits", operands.frozen, u, position)
    return logits, operands.head.rescored(params, u, logits)


def _of_next_token(logits: Float[Array, "c Vd"], chunk: Chunk) -> Float[Array, " c"]:
    """Return the logits of the true tokens."""
    # By a mask over the vocabulary: the gradient of a gather would be a scatter (slow).
    is_next = jnp.arange(logits.shape[-1]) == chunk.next_tokens[..., None]
    return jnp.where(is_next, logits, 0).sum(axis=-1)


def _is_labeled(chunk: Chunk) -> Bool[Array, " c"]:
    """Return which targets have a next token that the head can propose."""
    return chunk.has_next & (chunk.next_tokens >= 0)
