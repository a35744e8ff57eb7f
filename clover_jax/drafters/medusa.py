"""Medusa: independent heads on the base's last state; the baseline of the Clover paper.

Source: Medusa (arXiv 2401.10774). With g_t the base's state after its final norm:

    u^i = g_t + SiLU(W_i g_t + b_i)       W_i = b_i = 0 at the start
    lm_head_i u^i proposes x_{t+2+i}      an output matrix per position, or the base's for all

No head sees x_{t+1} or another head's choice, so all branches of a level have the same proposal.
There is one head for each position, so no draft goes deeper than it was trained for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec
from clover_jax.drafters.augmenting import take_last
from clover_jax.drafters.drafter import (
    AcceptedPositions,
    Drafter,
    Frozen,
    Ids,
    check_max_depth,
    frozen_from_base,
    head_logits,
    output_matrix,
    with_draft_rows,
)
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache
from clover_jax.models.decoder import project
from clover_jax.models.int8 import widen
from clover_jax.models.layers import matrix_init

METHOD_LOSS = LossSpec(hard_ce=1.0, decay=0.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """Medusa's heads. own_output: an output matrix for each, not the base's for all."""

    kind: str = "medusa"
    features: tuple[str, ...] = ("post_norm",)
    own_output: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_max_depth(self, "Medusa has one head for each position")


class ResidualHeads(nn.Module):
    """x + SiLU(W_i x + b_i) for position i; positions share nothing."""

    num_positions: int
    width: int

    def setup(self):
        shape = (self.num_positions, self.width)
        self.weight = self.param("weight", matrix_init(self.width), (*shape, self.width))
        self.bias = self.param("bias", nn.initializers.zeros, shape)

    def __call__(self, x: Float[Array, "*b D"], position: int) -> Float[Array, "*b D"]:
        return x + jax.nn.silu(x @ self.weight[position] + self.bias[position])


class Medusa(Drafter):
    """The heads; see the module's docstring for the equations.

    Their state is g at the last position, [B, 1, D], on all levels.
    """

    config: MedusaConfig

    def setup(self):
        cfg = self.config
        shape = (cfg.draft_vocab_size, cfg.layer.hidden_size)
        self.heads = ResidualHeads(cfg.num_positions, cfg.layer.hidden_size)
        # One param each: the loss of a position then touches no other's matrix.
        self.matrices = [
            self.param(name, nn.initializers.normal(0.02), shape) for name in self.output_params
        ]

    @property
    def scale_params(self) -> tuple[str, ...]:
        return self.output_params

    @property
    def output_params(self) -> tuple[str, ...]:
        cfg = self.config
        return tuple(f"lm_head_{i}" for i in range(cfg.num_positions if cfg.own_output else 0))

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[Float[Array, "B 1 D"], Cache]:
        # No head looks further back, so there is nothing to cache.
        return take_last(accepted.features, accepted.count), cache

    @property
    def reads_lm_head(self) -> bool:
        return not self.config.own_output

    def propose(
        self, frozen: Frozen, state: Float[Array, "B 1 D"], depth: int
    ) -> Float[Array, "B 1 Vd"]:
        """Return the logits that all branches of this level share."""
        return self.logits(frozen, self.heads(state, depth), depth)

    def advance(
        self, frozen: Frozen, state: Array, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> Float[Array, "B 1 D"]:
        """Return the state as it is: no head reads a drafted token."""
        return state

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        return jnp.stack([self.heads(features, i) for i in range(self.config.num_positions)])

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D"], position: int
    ) -> Float[Array, "*b Vd"]:
        # A head of its own for each position, or the base's for all.
        own = self.matrices[position] if self.matrices else None
        return head_logits(self.config, frozen, hidden) if own is None else project(own, hidden)


def make_config(
    base: BaseConfig,
    num_positions: int = MedusaConfig.num_positions,
    loss: LossSpec = METHOD_LOSS,
    **options: Any,
) -> MedusaConfig:
    """Return the config of heads for a base."""
    # A head for each position: deeper trees than these have no weights.
    return MedusaConfig(
        layer=base.head_layer,
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        max_depth=num_positions,
        loss=loss,
        **options,
    )


def init_from_base(config: MedusaConfig, params: Params, base_params: Params, rng: Array) -> Params:
    """Start as the base: residual blocks at zero, output matrices as its lm_head."""
    frozen = frozen_from_base(with_draft_rows(base_params, config))
    lm_head = widen(output_matrix(config, frozen), frozen.embedding.dtype)
    zeros = jax.tree.map(jnp.zeros_like, params["heads"])
    # All params other than the residual blocks are output matrices.
    return dict.fromkeys(params, lm_head) | {"heads": zeros}
