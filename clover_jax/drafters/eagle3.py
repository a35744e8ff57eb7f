"""EAGLE-3: one decoder layer over fused states of three base layers, trained on its own drafts.

Source: EAGLE-3 and its repository. With f_t the base's states entering layers 2, L//2 and L-3 at t
and e its input embedding, frozen:

    s_t = fc f_t                            what the base knows, fused once
    y   = s_t + attention([norm_e(e(x_{t+1})) ; norm_s(s_t)])
    o_t = y + mlp(norm(y))
    lm_head norm_o(o_t)                     proposes x_{t+2}; both are the head's own

Drafting on, o_t takes the place of s_{t+1}. Training does the same ("training-time test",
`on_own_drafts`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.augmenting import silent
from clover_jax.drafters.drafter import (
    Frozen,
    frozen_from_base,
    layer_for,
    output_matrix,
    with_draft_rows,
)
from clover_jax.drafters.layer_drafter import Attended, LayerDrafter
from clover_jax.models.batch import Batch
from clover_jax.models.cache import KeyValue
from clover_jax.models.decoder import SelfAttention, project
from clover_jax.models.int8 import contract
from clover_jax.models.layers import GatedMLP, RMSNorm, matrix_init

NUM_FEATURES = 3
METHOD_LOSS = LossSpec(
    soft_ce=1.0, decay=0.8, divisor="positions", divisor_offset=0.0, proposable="base"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """An EAGLE-3 head; num_positions are the steps of its training-time test."""

    kind: str = "eagle3"
    num_positions: int = 7

    def __post_init__(self):
        super().__post_init__()
        # `fc` has a fixed number of matrices, one for each of the three states.
        if len(self.features) != NUM_FEATURES:
            raise ValueError(f"EAGLE-3 reads {NUM_FEATURES} features, not {len(self.features)}")


class Eagle3(LayerDrafter):
    """The EAGLE-3 head; see the module's docstring for the equations."""

    config: Eagle3Config
    scale_params = ("output_norm",)
    output_params = ("output_norm", "lm_head")  # what `logits` reads
    reads_lm_head = False  # the base's

    def setup(self):
        # The head has norms, an MLP and an output matrix of its own; the base's are only read.
        layer = self.config.layer
        width, eps = layer.hidden_size, layer.rms_norm_eps
        fan_in = NUM_FEATURES * width
        self.fc = self.param("fc", matrix_init(fan_in), (NUM_FEATURES, width, width))
        self.embedding_norm = RMSNorm(eps)
        self.state_norm = RMSNorm(eps)
        self.attention = SelfAttention(layer)
        self.mlp_norm = RMSNorm(eps)
        self.mlp = GatedMLP(layer)
        self.output_norm = RMSNorm(eps)
        shape = (self.config.draft_vocab_size, width)
        self.lm_head = self.param("lm_head", nn.initializers.normal(0.02), shape)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        """Return the output of every step; a segment's last j + 1 positions have no pair at j."""
        outputs = self.on_own_drafts(frozen, features, batch)
        if self.is_initializing():
            self.output_norm(outputs[-1])  # `logits` is not called here
        return jnp.stack(outputs)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D"], position: int
    ) -> Float[Array, "*b Vd"]:
        """Return the head's own lm_head of the normed output."""
        return project(self.lm_head, self.output_norm(hidden))

    def fuse(self, features: Float[Array, "B A F"]) -> Float[Array, "B A D"]:
        """Mix the states of the three layers."""
        # Split along the features, so that a mesh need not cut one of them.
        split = features.reshape(*features.shape[:-1], NUM_FEATURES, -1)
        return contract("bacd,cde->bae", split, self.fc)

    def run(
        self, embedded: Float[Array, "B T D"], state: Float[Array, "B T D"], attended: Attended
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return o, without its norm, and the layer's fresh keys and values."""
        # Token and state are normed apart, because their scales have nothing in common.
        x = jnp.concatenate([self.embedding_norm(embedded), self.state_norm(state)], axis=-1)
        mixed, fresh = self.attention(x, *attended)
        x = state + mixed
        return x + self.mlp(self.mlp_norm(x)), fresh


def feature_layers(num_layers: int) -> tuple[str, ...]:
    """Return the base states that the head reads: those entering layers 2, L // 2 and L - 3.

    A base of fewer than 7 layers has no three such: there one state after its first layer, one from
    the middle and the last one; one of 2 layers gives a state twice, one of 1 its embedding.

    Example: 32 layers give layer_2, layer_16, layer_29; 4 give layer_1, layer_2, pre_norm.
    """
    # Small bases have no three states so far apart.
    if num_layers < 7:
        return (f"layer_{min(1, num_layers - 1)}", f"layer_{num_layers // 2}", "pre_norm")
    return tuple(f"layer_{index}" for index in (2, num_layers // 2, num_layers - 3))


def make_config(
    base: BaseConfig,
    rope: RopeConfig | None = None,
    loss: LossSpec = METHOD_LOSS,
    llama_layer: bool = False,
    **options: Any,
) -> Eagle3Config:
    """Return the head's config for a base; the rotary base is the base's own unless given.

    llama_layer: leave out what the base's layers have beyond a plain Llama's.
    """
    return Eagle3Config(
        layer=layer_for(base, rope, llama_layer),
        vocab_size=base.vocab_size,
        features=feature_layers(base.num_layers),
        loss=loss,
        **options,
    )


def init_from_base(config: Eagle3Config, params: Params, base_params: Params, rng: Array) -> Params:
    """Start as what the base's final norm and lm_head make of the deepest state that is read.

    fc passes that state on, and both sublayers add nothing at first. Random ones, as in the
    repository, add a branch of a size of their own to states whose size is the base's.
    """
    # The head starts as the base's own vocabulary, so that early steps propose words.
    frozen = frozen_from_base(with_draft_rows(base_params, config))
    fc = jnp.zeros_like(params["fc"]).at[-1].set(jnp.eye(params["fc"].shape[-1]))
    return {
        "fc": fc,
        "attention": silent(params["attention"]),
        "mlp": silent(params["mlp"]),
        "lm_head": output_matrix(config, frozen),
        "output_norm": {"scale": frozen.final_norm},
    }
