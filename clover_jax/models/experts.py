"""A mixture of experts: many gated MLPs, of which a router chooses a few for each token.

    p = softmax(W x)                                      over the experts, in float32
    y = sum over the k largest p_e of p_e down_e(activation(gate_e x) * up_e x)

Tokens are sorted by expert, and one grouped product does all experts at once. No expert has a
capacity, so no token is dropped, and what a token gets does not depend on the others.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int
from clover_jax.config import LayerConfig
from clover_jax.models.int8 import Int8Matrix, Matrix
from clover_jax.models.layers import activate, let_through, matrix_init


class ExpertMLP(nn.Module):
    """The experts of one layer, [X, D, F] and [X, F, D], and their router."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply to each position the experts that are chosen for it."""
        cfg = self.config
        number, width, inner = cfg.num_experts, cfg.hidden_size, cfg.expert_size
        router = self.param("router", matrix_init(width), (width, number))

        # Each token's experts, and how much each counts.
        tokens = x.reshape(-1, width)
        scores = tokens @ router
        if cfg.expert_bias:
            scores = scores + self.param("router_bias", nn.initializers.zeros, (number,))
        probability = jax.nn.softmax(scores.astype(jnp.float32))
        weight, chosen = jax.lax.top_k(probability, cfg.experts_per_token)
        if cfg.normed_weights:
            weight = weight / weight.sum(axis=-1, keepdims=True)

        # One row for each pair of token and expert, those of an expert side by side.
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        expert, rows = expert[order], tokens[order // cfg.experts_per_token]
        size = jnp.bincount(expert, length=number)

        def product(rows: Array, name: str, inputs: int, outputs: int) -> Array:
            matrix = self.param(name, matrix_init(inputs), (number, inputs, outputs))
            result = _grouped(rows, matrix, expert, size)
            if not cfg.expert_bias:
                return result
            shape = (number, outputs)
            return result + self.param(f"{name}_bias", nn.initializers.zeros, shape)[expert]

        gate, up = (product(rows, name, width, inner) for name in ("expert_gate", "expert_up"))
        hidden = activate(cfg.activation, gate) * let_through(cfg.activation, up)
        hidden = product(hidden, "expert_down", inner, width)

        # Back in the order of tokens, whose own experts are summed up in an order of their own.
        given = hidden[jnp.argsort(order)].reshape(*chosen.shape, width)
        total = jnp.einsum("nkd,nk->nd", given, weight, preferred_element_type=jnp.float32)
        return total.astype(x.dtype).reshape(x.shape)


def _grouped(
    rows: Float[Array, "R I"], matrix: Matrix, expert: Int[Array, " R"], size: Int[Array, " X"]
) -> Float[Array, "R O"]:
    """Return each row times its expert's matrix [X, I, O]; rows are sorted by expert.

    size: rows of each expert.
    """
    if not isinstance(matrix, Int8Matrix):
        return jax.lax.ragged_dot(rows, matrix, size)
    values = matrix.values.astype(rows.dtype)
    product = jax.lax.ragged_dot(rows, values, size, preferred_element_type=jnp.float32)
    return (product * matrix.step[expert, 0]).astype(rows.dtype)
