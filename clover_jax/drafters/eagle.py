"""EAGLE-1: one decoder layer that predicts the base's next state, the attention-decoder baseline.

Source: EAGLE and its repository; Clover-2's release has the same head. With g_t the base's state
after its final norm and e the base's input embedding, both frozen:

    o_t = layer(fc([e(x_{t+1}) ; g_t]))    a prediction of g_{t+1}; the layer has no input norm
    lm_head o_t                            proposes x_{t+2}

Drafting on, o_t takes the place of the g_{t+1} that is not known yet. EAGLE-2 is the same head with
a tree chosen by probability (`--tree=dynamic:59:7:10` has its repository's defaults).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.augmenting import silent
from clover_jax.drafters.drafter import Frozen, layer_for
from clover_jax.drafters.layer_drafter import Attended, LayerDrafter
from clover_jax.drafters.tokens import embed_input, shift_left
from clover_jax.models.batch import Batch
from clover_jax.models.cache import KeyValue
from clover_jax.models.decoder import DecoderLayer, packed_mask
from clover_jax.models.layers import matrix_init

NOISE_LENGTH = 512  # sequence length at which the noise has its stated width
METHOD_LOSS = LossSpec(regression=1.0, soft_ce=0.1, divisor_offset=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(DrafterConfig):
    """An EAGLE-1 head.

    fc_bias: whether fc has a bias.
    feature_noise: in training, features get U(-noise, noise) x 512 / length of their sequence.
    """

    kind: str = "eagle"
    num_positions: int = 1
    features: tuple[str, ...] = ("post_norm",)
    fc_bias: bool = True
    feature_noise: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        # Later positions are the head's own output, which training does not show it.
        if self.num_positions != 1:
            raise ValueError(
                f"EAGLE is trained to predict one position and drafts further ones by itself: "
                f"num_positions ({self.num_positions}) must be 1"
            )
        if not 0 <= self.feature_noise < math.inf:
            raise ValueError(f"feature_noise ({self.feature_noise}) must be at least 0, and finite")


class Eagle(LayerDrafter):
    """The EAGLE-1 head; see the module's docstring for the equations."""

    config: EagleConfig
    scale_params = ("fc",)

    def setup(self):
        # fc is stored as two matrices, of the embedding and of the state, so that neither input is
        # copied to lie next to the other.
        width = self.config.layer.hidden_size
        self.fc = self.param("fc", matrix_init(2 * width), (2, width, width))
        if self.config.fc_bias:
            self.fc_bias = self.param("fc_bias", nn.initializers.zeros, (width,))
        self.layer = DecoderLayer(self.config.layer, input_norm=False)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "1 B S D"]:
        """Return o_t from the base's true states; with `rng` these are noisy."""
        # When drafting, the head reads its own inexact states; noise trains it for that.
        if rng is not None and self.config.feature_noise:
            noise = self.config.feature_noise
            features = features + noise_like(features, batch.segment_ids, rng, noise)
        embedded = embed_input(self.config, frozen, shift_left(batch.tokens, 1))
        attended = Attended(batch.positions, packed_mask(batch.segment_ids))
        hidden, _ = self.run(embedded, features, attended)
        return hidden[None]

    def run(
        self, embedded: Float[Array, "B T D"], state: Float[Array, "B T D"], attended: Attended
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        # Two products instead of one over a concatenation, which would be stored first.
        x = embedded @ self.fc[0] + state @ self.fc[1]
        if self.config.fc_bias:
            x = x + self.fc_bias
        return self.layer(x, *attended)


def noise_like(
    features: Float[Array, "B S F"], segment_ids: Int[Array, "B S"], rng: Array, width: float
) -> Float[Array, "B S F"]:
    """Return U(-width, width) x 512 / S, with S the length of each position's own sequence."""
    # Documents are packed, so a row's length is not the document's.
    together = segment_ids[:, :, None] == segment_ids[:, None, :]
    scale = NOISE_LENGTH / together.sum(axis=-1)
    noise = jax.random.uniform(rng, features.shape, jnp.float32, -width, width)
    return (noise * scale[..., None]).astype(features.dtype)


def make_config(
    base: BaseConfig,
    rope: RopeConfig | None = None,
    loss: LossSpec = METHOD_LOSS,
    llama_layer: bool = False,
    **options: Any,
) -> EagleConfig:
    """Return the head's config for a base; the rotary base is the base's own unless given.

    llama_layer: leave out what the base's layers have beyond a plain Llama's.
    """
    # Branches that are normed, as Gemma's, cannot begin at nothing.
    layer = layer_for(base, rope, llama_layer).with_plain_branches()
    return EagleConfig(layer=layer, vocab_size=base.vocab_size, loss=loss, **options)


def init_from_base(config: EagleConfig, params: Params, base_params: Params, rng: Array) -> Params:
    """Start as the base: fc passes g_t on, and both sublayers add nothing at first.

    (The method starts at random, which on a base with large states is far worse than guessing.)
    """
    width = config.layer.hidden_size
    layer = params["layer"]
    return {
        "fc": params["fc"].at[1].set(jnp.eye(width)) * jnp.array([0.0, 1.0])[:, None, None],
        "layer": layer | {name: silent(layer[name]) for name in ("attention", "mlp")},
    }
