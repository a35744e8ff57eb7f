"""A gated recurrent unit for heads that feed drafted tokens back at a low rank."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from clover_jax.array_types import Array, Float


class GatedRecurrence(nn.Module):
    """A gated recurrent unit: s' = (1 - gate) s + gate tanh(candidate [reset * s ; e]).

    gate and reset are sigmoids of [s ; e].
    """

    rank: int

    @nn.compact
    def __call__(
        self, state: Float[Array, "*b r"], token: Float[Array, "*b r"]
    ) -> Float[Array, "*b r"]:
        """Take in one token."""
        rank, init = self.rank, nn.initializers.lecun_normal()
        gates = self.param("gates", init, (2, 2 * rank, rank))
        biases = self.param("gates_bias", nn.initializers.zeros, (2, rank))
        matrix = self.param("candidate", init, (2 * rank, rank))
        both = jnp.concatenate([state, token], axis=-1)
        gate, reset = (nn.sigmoid(both @ gates[i] + biases[i]) for i in range(2))
        candidate = jnp.tanh(jnp.concatenate([reset * state, token], axis=-1) @ matrix)
        return state + gate * (candidate - state)
