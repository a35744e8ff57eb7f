"""The distillation loss as the method states it: every logit at once, plain autodiff.

Slow and obvious; it judges `losses.distillation_loss`, value and gradient.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Params
from clover_jax.drafters.drafter import Frozen
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.batch import Batch


def plain_loss(
    head: DraftHead,
    params: Params,
    frozen: Frozen,
    hidden: Float[Array, "P B S D"],
    target_states: Float[Array, "B S D"],
    batch: Batch,
) -> tuple[Float[Array, ""], dict[str, Float[Array, " P"]]]:
    """Return the loss and its terms per position, pair by pair as in methods: (t, t + 1 + i)."""
    spec = head.config.loss
    num_positions, _, size, _ = hidden.shape
    pairs = [
        _plain_pairs(i, head, params, frozen, hidden, target_states, batch)
        for i in range(num_positions)
    ]
    worth = _plain_worth(spec, pairs, size)

    terms: dict[str, list] = {name: [] for name in [*pairs[0]["terms"], "accuracy", "pairs"]}
    total = jnp.zeros(())
    for i, pair in enumerate(pairs):
        mask = pair["mask"].astype(jnp.float32)
        for name, values in pair["terms"].items():
            # H counts only where the token to predict is of the target's document.
            weights = mask * pair["labeled"] if name in ("hard_ce", "candidate_ce") else mask
            counted = {
                "pairs": weights.sum(),
                "positions": batch.tokens.size,
                "weights": _all_weights(spec, pairs, name),
            }[spec.divisor]
            divisor = counted + spec.divisor_offset
            terms[name].append((values * weights).sum() / divisor)
            total += getattr(spec, name) * (worth[i] * values * weights).sum() / divisor

        terms["accuracy"].append((pair["hits"] * mask).sum() / jnp.maximum(mask.sum(), 1))
        terms["pairs"].append(mask.sum())
    return total, {name: jnp.stack(values) for name, values in terms.items()}


def _all_weights(spec, pairs, name):
    """Return the sum of decay^i over all pairs that a term counts."""
    told = name in ("hard_ce", "candidate_ce")
    masks = [pair["mask"] & pair["labeled"] if told else pair["mask"] for pair in pairs]
    return sum(spec.decay**i * mask.sum() for i, mask in enumerate(masks))


def _plain_pairs(i, head, params, frozen, hidden, target_states, batch):
    """Return everything of the pairs (t, t + 1 + i), in the order of t."""
    spec = head.config.loss
    size = hidden.shape[2]
    source, target = slice(0, max(size - 1 - i, 0)), slice(i + 1, size)
    segment = batch.segment_ids
    together = (segment[:, source] == segment[:, target]) & (segment[:, source] > 0)
    if spec.pairs == "release":
        mask = batch.loss_mask[:, i : size - 1] & together
    else:  # x_{t+1} .. x_{t+2+i} are of one document and one answer
        ahead = [jnp.roll(batch.loss_mask & (segment > 0), -k, axis=1) for k in range(1, i + 3)]
        same = jnp.roll(segment, -i - 2, axis=1) == segment
        inside = jnp.arange(size) < size - i - 2
        mask = functools.reduce(jnp.logical_and, ahead, same & inside)[:, source]

    # Both distributions, the base's restricted to what the head can propose.
    u, g = hidden[i, :, source], jax.lax.stop_gradient(target_states[:, target])
    logits = head.module.apply({"params": params}, frozen, u, i, method="logits")
    log_q = jax.nn.log_softmax(logits)
    full = jnp.einsum("btd,vd->btv", g, frozen.lm_head)
    table = jnp.asarray(head.config.draft_to_target or range(head.config.vocab_size))
    p, q = jax.nn.softmax(full[..., table]), jnp.exp(log_q)

    # The token to predict is of the target's document, or there is none.
    after = jnp.pad(segment, ((0, 0), (0, 1)))[:, 1:][:, target]
    labeled = after == segment[:, target]
    is_next = jnp.roll(batch.tokens, -1, axis=1)[:, target, None] == table

    # R, S, H, V and C of each pair.
    wanted = is_next if spec.proposable == "text" else full.argmax(axis=-1)[..., None] == table
    proposable = wanted.any(axis=-1)
    if spec.proposable == "text":
        proposable |= ~labeled
    distance = jnp.abs(u - g)
    smooth = jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5)
    rejection = 0.5 * jnp.abs(p - q).sum(axis=-1)
    terms = {
        "regression": smooth.mean(axis=-1),
        "soft_ce": -(p * log_q).sum(axis=-1) * proposable,
        "hard_ce": -jnp.where(is_next, log_q, 0).sum(axis=-1),
        "total_variation": rejection * proposable,
        "candidate_ce": -jnp.where(is_next, log_q, 0).sum(axis=-1),
    }
    return {
        "mask": mask,
        "labeled": labeled,
        "label": jnp.where(is_next, q, 0).sum(axis=-1) * labeled,
        "terms": terms,
        "hits": (logits.argmax(axis=-1) == p.argmax(axis=-1)) & proposable,
    }


def _plain_worth(spec, pairs, size):
    """Return w of every pair by position, in the order of t: decay^i, or D-PACE's."""
    if not spec.dpace:
        return [spec.decay**i for i in range(len(pairs))]

    # All positions of a t in one column; what does not count is no part of the product.
    pad = lambda x: jnp.pad(x, ((0, 0), (0, size - x.shape[1])))  # noqa: E731
    reached, chances = 1.0, []
    for pair in pairs:
        label = jax.lax.stop_gradient((1 - spec.dpace) * pair["label"] + spec.dpace)
        reached = reached * jnp.where(pad(pair["mask"]), pad(label), 1)
        chances.append(reached * pad(pair["mask"]))
    return [sum(chances[i:])[:, : pair["mask"].shape[1]] for i, pair in enumerate(pairs)]
