"""The terms of the distillation loss, of the pairs (t, i) of a chunk.

With u = hidden[i, t], g the base's final state at the target index t+1+i, p = softmax(lm_head g)
and q = softmax(logits(u)):

    A_i = sum_v min(p(v), q(v))               how often a token drawn from q is accepted
    R_i = SmoothL1(u, g) averaged over D      regression
    S_i = - sum_v p(v) log q(v)               soft_ce, soft cross-entropy
    H_i = - log q(x_{t+2+i})                  hard_ce, hard cross-entropy
    V_i = 1 - A_i                             total_variation
    N_i = - log A_i                           neg_log_acceptance
    L_i = c KL(p || q) + (1 - c) V_i          lk, with c = exp(-lk_eta A_i), no gradient through c
    C_i = - log q'(x_{t+2+i})                 candidate_ce, q' over the few rescored candidates

V is how often lossless verification refuses a token that was drawn from q. Where p and q hardly
overlap its gradient vanishes; S beside it leads there, and weighs less as they come together. N has
the same optimum and a gradient 1 / A times as large. L (LK, arXiv 2602.23881) goes from KL to V,
pair by pair, as A grows.

C is 0 for a pair whose true token is none of the candidates. For a head that does not rescore, C is
H.

A head with a reduced vocabulary is compared with p restricted to it and renormalised. A pair whose
most probable token of the base lies outside has S_i = V_i = N_i = L_i = 0 but stays in the divisor,
as in EAGLE-3: any proposal is refused there. H_i is 0 where the true token lies outside. R_i counts
everywhere. Accuracy is that of the whole vocabulary: outside is a miss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Params
from clover_jax.training.loss_chunks import Chunk, Operands, Terms

TINY = jnp.finfo(jnp.float32).tiny


def pair_terms(
    position: int, operands: Operands, owned: Params, u: Array, chunk: Chunk
) -> tuple[Terms, Bool[Array, " c"]]:
    """Return the terms of a group's chunk, [c] each, and the hits; 0 where one does not count."""
    logits, scores = logits_and_scores(position, operands, owned, u)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    cross_entropy = log_total - (chunk.teacher * logits).sum(axis=-1)

    # Where several tokens tie for the base's best, proposing any of them is a hit.
    is_best = chunk.teacher >= chunk.teacher.max(axis=-1, keepdims=True)
    # Two sums: 1 - A would round V away where p and q are nearly the same, and 1 - V would round A
    # away where they hardly overlap.
    probability = jnp.exp(logits - log_total[..., None])
    acceptance = jnp.minimum(chunk.teacher, probability).sum(axis=-1)
    refusal = 0.5 * jnp.abs(chunk.teacher - probability).sum(axis=-1)
    # -log A by whichever of the two sums is the smaller one. The other is clamped: `where` sends a
    # gradient through both branches, and 0 times infinity is no number.
    by_acceptance = -jnp.log(jnp.maximum(acceptance, TINY))
    by_refusal = -jnp.log1p(-jnp.minimum(refusal, 0.5))
    # KL(p || q) = H(p, q) - H(p).
    kl = cross_entropy - chunk.entropy
    kl_share = jax.lax.stop_gradient(jnp.exp(-operands.head.config.loss.lk_eta * acceptance))

    # The targets of the chunk that each term counts; see the module's docstring.
    mask, of_next = chunk.mask, of_next_token(scores, chunk)
    labelled = mask & is_labelled(chunk)
    in_reach = mask & chunk.reachable
    terms = Terms(
        regression=jnp.where(mask, _regression(u, chunk.states), 0.0),
        soft_ce=jnp.where(in_reach, cross_entropy, 0.0),
        hard_ce=jnp.where(labelled, log_total - of_next_token(logits, chunk), 0.0),
        total_variation=jnp.where(in_reach, refusal, 0.0),
        # Below the smallest number there is no gradient, rather than one that is not finite.
        neg_log_acceptance=jnp.where(
            in_reach, jnp.where(refusal < 0.5, by_refusal, by_acceptance), 0.0
        ),
        lk=jnp.where(in_reach, kl_share * kl + (1 - kl_share) * refusal, 0.0),
        candidate_ce=jnp.where(
            labelled & jnp.isfinite(of_next), jax.nn.logsumexp(scores, axis=-1) - of_next, 0.0
        ),
    )
    # By the scores after `rescore`, since decoding proposes by those.
    hits = jnp.where(is_best, scores, -jnp.inf).max(axis=-1) >= scores.max(axis=-1)
    return terms, in_reach & hits


def logits_and_scores(
    position: int, operands: Operands, owned: Params, u: Array
) -> tuple[Float[Array, "c Vd"], Float[Array, "c Vd"]]:
    """Return a head's logits, and its candidates' scores after `rescore`, -inf for others."""
    params = {**operands.params, **owned}
    logits = operands.head.apply(params, "logits", operands.frozen, u, position)
    return logits, operands.head.rescored(params, u, logits)


def of_next_token(logits: Float[Array, "c Vd"], chunk: Chunk) -> Float[Array, " c"]:
    """Return the logits of the true tokens."""
    # By a mask over the vocabulary: the gradient of a gather would be a scatter (slow).
    is_next = jnp.arange(logits.shape[-1]) == chunk.next_tokens[..., None]
    return jnp.where(is_next, logits, 0).sum(axis=-1)


def is_labelled(chunk: Chunk) -> Bool[Array, " c"]:
    """Return which targets have a next token that the head can propose."""
    return chunk.has_next & (chunk.next_tokens >= 0)


def _regression(u: Float[Array, "*b D+"], states: Float[Array, "*b D"]) -> Float[Array, "*b"]:
    """Return R of each pair, of the columns of u that predict a state of the base.

    SmoothL1, Huber's loss with beta 1: d^2 / 2 where |d| < 1, else |d| - 1/2.
    """
    # Squares of states in bfloat16 would lose the small distances.
    predicted = u[..., : states.shape[-1]].astype(jnp.float32)
    distance = jnp.abs(predicted - states.astype(jnp.float32))
    return jnp.where(distance < 1, 0.5 * distance * distance, distance - 0.5).mean(axis=-1)
