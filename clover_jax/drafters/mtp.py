"""MTP: the multi-token prediction layer that a base brings with it, used recurrently to any depth.

Source: DeepSeek-V3's module, as Qwen3-Next and Qwen3.5 store it. With g_t the base's state after
its final norm and e its input embedding, both frozen:

    o_t = norm_o(layer(fc [norm_e(e(x_{t+1})) ; norm_g(g_t)]))    a full layer, of attention
    lm_head o_t                                                    proposes x_{t+2}

Drafting on, o_t takes the place of the g_{t+1} that is not known yet. Training does the same, step
after step, as EAGLE-3 does. `--draft=mtp` reads the layer from the base's folder.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.augmenting import silent
from clover_jax.drafters.drafter import Frozen
from clover_jax.drafters.layer_drafter import Attended, LayerDrafter
from clover_jax.models.batch import Batch
from clover_jax.models.cache import KeyValue
from clover_jax.models.decoder import DecoderLayer
from clover_jax.models.int8 import contract
from clover_jax.models.layers import RMSNorm, matrix_init

METHOD_LOSS = LossSpec(soft_ce=1.0, decay=0.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(DrafterConfig):
    """A base's own drafting layer; num_positions are the steps of training on its own drafts."""

    kind: str = "mtp"
    num_positions: int = 3
    features: tuple[str, ...] = ("post_norm",)


class MTP(LayerDrafter):
    """The MTP head; see the module's docstring for the equations."""

    config: MTPConfig
    scale_params = ("output_norm",)

    def setup(self):
        layer = self.config.layer
        # Two matrices, so that token and state need not be copied to lie next to each other.
        shape = (2, layer.hidden_size, layer.hidden_size)
        self.fc = self.param("fc", matrix_init(2 * layer.hidden_size), shape)
        self.embedding_norm = RMSNorm(layer.rms_norm_eps)
        self.state_norm = RMSNorm(layer.rms_norm_eps)
        self.layer = DecoderLayer(layer)
        self.output_norm = RMSNorm(layer.rms_norm_eps)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        """Return the output of every step; a segment's last j + 1 positions have no pair at j."""
        return jnp.stack(self.on_own_drafts(frozen, features, batch))

    def run(
        self, embedded: Float[Array, "B T D"], state: Float[Array, "B T D"], attended: Attended
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return o and the layer's fresh keys and values."""
        both = jnp.stack([self.embedding_norm(embedded), self.state_norm(state)])
        x = contract("cbtd,cde->bte", both, self.fc)
        hidden, fresh = self.layer(x, *attended)
        return self.output_norm(hidden), fresh


def layer_of(base: BaseConfig) -> LayerConfig:
    """Return the shape of the drafting layer: a base's layer with attention, experts included."""
    if base.parallel_mlp or base.token_size:  # more branches, normed: they cannot begin at nothing
        return base.head_layer
    layer = {field.name: getattr(base, field.name) for field in dataclasses.fields(LayerConfig)}
    return LayerConfig(**layer | {"sliding_window": None, "delta": None})


def make_config(
    base: BaseConfig, rope: RopeConfig | None = None, loss: LossSpec = METHOD_LOSS, **options: Any
) -> MTPConfig:
    """Return the head's config for a base; the rotary base is the base's own unless given."""
    layer = layer_of(base).with_plain_branches()
    layer = dataclasses.replace(layer, rope=rope or layer.rope)
    return MTPConfig(layer=layer, vocab_size=base.vocab_size, loss=loss, **options)


def init_from_base(config: MTPConfig, params: Params, base_params: Params, rng: Array) -> Params:
    """Start as the base, for one without such a layer: the state passes, at its usual length."""
    width = config.layer.hidden_size
    scale = base_params["final_norm"]["scale"].astype(jnp.float32)
    length = jnp.sqrt(jnp.mean(scale**2))
    layer = params["layer"]
    return {
        "fc": jnp.zeros_like(params["fc"]).at[1].set(jnp.eye(width)),
        "layer": layer | {name: silent(layer[name]) for name in ("attention", "mlp")},
        "output_norm": {"scale": jnp.full(scale.shape, length)},
    }
