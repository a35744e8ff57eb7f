"""The small MLP of Medusa's and Clover's heads: one residual block for each draft position."""

from __future__ import annotations

import flax.linen as nn
import jax

from clover_jax.array_types import Array, Float
from clover_jax.models.layers import matrix_init


class ResidualHeads(nn.Module):
    """x + SiLU(W_i x + b_i) for position i; positions share nothing."""

    num_positions: int
    width: int

    def setup(self):
        shape = (self.num_positions, self.width)
        self.weight = self.param("weight", matrix_init(self.width), (*shape, self.width))
        self.bias = self.param("bias", nn.initializers.zeros, shape)

    def __call__(self, x: Float[Array, "*b D"], position: int) -> Float[Array, "*b D"]:
        """Apply the block of one position."""
        return x + jax.nn.silu(x @ self.weight[position] + self.bias[position])
