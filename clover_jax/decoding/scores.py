"""Log-probabilities of emitted tokens, computed for requests that want them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Float, Int
from clover_jax.decoding.accept import finite_log_softmax
from clover_jax.decoding.requests import TokenScore

MOST_ALTERNATIVES = 20  # tokens whose log-probabilities are given beside the text's own


class Scores(struct.PyTreeNode):
    """The base's log-probabilities of the text's tokens, before temperature; N alternatives each.

    log_probability: [B, T] of the tokens themselves.
    top_ids, top_log_probabilities: [B, T, N] the most probable tokens, best first.
    """

    log_probability: Float[Array, "B T"]
    top_ids: Int[Array, "B T N"]
    top_log_probabilities: Float[Array, "B T N"]


def score(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Scores:
    """Return the scores of tokens that follow the positions of these logits."""
    log_probability = finite_log_softmax(logits)
    own = jnp.take_along_axis(log_probability, tokens[..., None], axis=-1)[..., 0]
    # A tiny base may have fewer tokens than MOST_ALTERNATIVES.
    top, ids = jax.lax.top_k(log_probability, min(MOST_ALTERNATIVES, logits.shape[-1]))
    return Scores(own, ids, top)


def read_scores(scores: Scores, row: tuple[int, ...], count: int) -> list[TokenScore]:
    """Return the first `count` scores of a row; `row` indexes all axes before the tokens'."""
    own, ids, top = (
        np.asarray(leaf)[row][:count].tolist()
        for leaf in (scores.log_probability, scores.top_ids, scores.top_log_probabilities)
    )
    return [TokenScore(*each) for each in zip(own, ids, top, strict=True)]
