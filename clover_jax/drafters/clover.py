"""Clover: heads that see the tokens drafted before them, on an Augmenting Block.

Source: Clover (arXiv 2405.00263), its text and figure; no code was released, so "ours" marks a
reading of our own. At position t, with h_t the base's state before its final norm, lm_head the
base's, norm at first its final norm, and E the rows of lm_head scaled to length 1:

    z_t = AugmentingBlock(h_0 .. h_t)                 a decoder layer over the whole prefix
    h^0 = AttentionDecoder(z_t, E[x_{t+1}])           the regressive connection begins
    h^i = AttentionDecoder(h^{i-1}, E[x_{t+1+i}])     same weights at every position
    u^i = norm(h^i + SiLU(W_i h^i + b_i))             lm_head u^i proposes x_{t+2+i}

(The paper counts heads from 1: its head i + 1 is position i here, its h^0 our z.) The Attention
Decoder adds SiLU(cosine-weighted value), without biases; that its one key is weighed by a cosine
as in Clover-2, and that a norm comes last, are ours.

Every position has its own W_i, so a head drafts no deeper than the positions it was trained for.

The paper's ablation removes, one after the other: the Attention Decoder, whose place an MLP on
[h ; e] takes; the regressive connection; the Augmenting Block. What is left is Medusa on h, with
the final norm after the residual block instead of before it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.attention_decoder import (
    AttentionDecoder,
    check_heads,
    default_heads,
    l2_normalize,
    with_matrices,
)
from clover_jax.drafters.augmenting import (
    augment,
    check_depth,
    from_last_layer,
    initial_state_size,
    run_trunk,
    silent_layers,
    unit_rms,
)
from clover_jax.drafters.drafter import (
    AcceptedPositions,
    Drafter,
    Frozen,
    Ids,
    check_max_depth,
    layer_for,
)
from clover_jax.drafters.medusa import ResidualHeads
from clover_jax.drafters.tokens import embed, extend, window
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, init_cache
from clover_jax.models.decoder import DecoderLayer, packed_mask
from clover_jax.models.layers import RMSNorm, matrix_init, rms_norm

NOISE = 0.01  # standard deviation of the initialization noise; ours, the paper gives none
METHOD_LOSS = LossSpec(hard_ce=1.0, decay=0.8)
REGRESSIVE_BLOCKS = ("attention_decoder", "mlp", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloverConfig(DrafterConfig):
    """A Clover head; what is not the default is one of the paper's ablations.

    regressive_block: what mixes a drafted token into the state, one of REGRESSIVE_BLOCKS; "none"
        has no regressive connection: every position reads z_t.
    num_augmenting_layers: depth of the Augmenting Block; 0 leaves it out: z_t = h_t.
    decoder_bias: whether the Attention Decoder's query, key and value have one, as in Clover-2.
    decoder_silu: whether its result goes through a SiLU, as in the paper's figure, not in its text.
    decoder_heads: how many heads it has; 0 for heads as wide as the base's.
    unit_states: scale the base's states to one size first (`initial_state_size`); the Augmenting
        Block then adds nothing to begin with.
    own_norm: whether the scale of the final norm is the head's own, at first the base's; False as
        in heads that were trained without one.
    """

    kind: str = "clover"
    num_positions: int = 3
    regressive_block: str = "attention_decoder"
    num_augmenting_layers: int = 1
    decoder_bias: bool = False
    decoder_silu: bool = True
    decoder_heads: int = 0
    unit_states: bool = False
    own_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        # The ablation may leave the Augmenting Block out, not the positions.
        check_depth(self.num_augmenting_layers, least_layers=0)
        check_max_depth(self, "every position of Clover has an MLP of its own")
        if self.regressive_block not in REGRESSIVE_BLOCKS:
            raise ValueError(
                f"regressive_block {self.regressive_block!r} is not one of "
                f"{', '.join(REGRESSIVE_BLOCKS)}"
            )
        if self.regressive_block == "attention_decoder":
            check_heads(self.layer, self.decoder_heads)


class RegressiveMLP(nn.Module):
    """x + SiLU(W [norm(x) ; e] + b), the residual block of the heads, which read the token and x.

    The paper says only that an MLP takes the decoder's place. That it is what the paper calls an
    MLP in the heads, and that x is normed as the decoder's query is, are ours.
    """

    config: LayerConfig

    def setup(self):
        width = self.config.hidden_size
        self.norm = RMSNorm(self.config.rms_norm_eps)
        self.inward = self.param("inward", matrix_init(2 * width), (2, width, width))
        self.inward_bias = self.param("inward_bias", nn.initializers.zeros, (width,))

    def read(self, embedded: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Return the token's part of the block's product."""
        return embedded @ self.inward[1]

    def mix(self, x: Float[Array, "*b D"], token: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        return x + jax.nn.silu(self.norm(x) @ self.inward[0] + token + self.inward_bias)


class Clover(Drafter):
    """The Clover head; see the module's docstring for the equations.

    The state of W branches is h^i, [B, W, D]; without a regressive connection z, [B, 1, D], at all
    levels.
    """

    config: CloverConfig

    @property
    def scale_params(self) -> tuple[str, ...]:
        return ("output_norm",) if self.config.own_norm else ()

    def setup(self):
        # One regressive block serves all positions; each has a residual head of its own.
        cfg = self.config
        self.augmenting = [DecoderLayer(cfg.layer) for _ in range(cfg.num_augmenting_layers)]
        self.regressive: AttentionDecoder | RegressiveMLP | None
        if cfg.regressive_block == "attention_decoder":
            self.regressive = AttentionDecoder(
                cfg.layer, cfg.decoder_bias, cfg.decoder_silu, cfg.decoder_heads
            )
        elif cfg.regressive_block == "mlp":
            self.regressive = RegressiveMLP(cfg.layer)
        else:
            self.regressive = None

        if cfg.unit_states:
            self.state_size = self.param("state_size", nn.initializers.ones, (1,))
        self.heads = ResidualHeads(cfg.num_positions, cfg.layer.hidden_size)
        if cfg.own_norm:
            self.output_norm = RMSNorm(cfg.layer.rms_norm_eps)

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        layers = self.config.num_augmenting_layers
        return init_cache(self.config.layer, layers, batch, length, dtype)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[Float[Array, "B 1 D"], Cache]:
        trunk = functools.partial(augment, self.augmenting, self._sized(accepted.features))
        last, cache = run_trunk(trunk, accepted, cache)
        if self.regressive is None:
            return last, cache
        # The root of the next tree is the token after the last accepted position.
        index = jnp.maximum(accepted.count - 1, 0)[:, None]
        token = jnp.take_along_axis(accepted.next_tokens, index, axis=1)
        return self._follow(frozen, last, token), cache

    def propose(
        self, frozen: Frozen, state: Float[Array, "B W D"], depth: int
    ) -> Float[Array, "B W Vd"]:
        return self.logits(frozen, self._output(frozen, state, depth), depth)

    def advance(
        self, frozen: Frozen, state: Array, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> Float[Array, "B W D"]:
        """Feed a drafted token back: the regressive connection."""
        if self.regressive is None:
            return state
        # Each branch goes on from its own parent.
        above = jnp.take_along_axis(state, parent[..., None], axis=1)
        return self._follow(frozen, above, token)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        """Return u^i_t under teacher forcing; a segment's last i + 1 positions have no pair."""
        mask = packed_mask(batch.segment_ids)
        # z of every text position at once.
        state, _ = augment(self.augmenting, self._sized(features), batch.positions, mask)
        count, size = self.config.num_positions, batch.tokens.shape[1]
        if self.regressive is not None:
            # It depends on the token alone: computed once, shifted further at every position.
            read = self._read(frozen, extend(batch.tokens, count))
        outputs = []
        # At each position the state mixes in the text's token, then passes that position's block.
        for depth in range(count):
            if self.regressive is not None:
                state = self.regressive.mix(state, window(read, depth + 1, size))
            outputs.append(self._output(frozen, state, depth))
        return jnp.stack(outputs)

    def _sized(self, features: Float[Array, "B A D"]) -> Float[Array, "B A D"]:
        return self.state_size * unit_rms(features) if self.config.unit_states else features

    def _follow(self, frozen: Frozen, state: Array, token: Int[Array, "B W"]) -> Array:
        assert self.regressive is not None  # the caller has checked
        return self.regressive.mix(state, self._read(frozen, token))

    def _read(self, frozen: Frozen, tokens: Int[Array, "*b"]) -> Array:
        # A row's length follows its token's frequency, which tells the state nothing.
        rows = embed(frozen, tokens)
        direction = l2_normalize(rows.astype(jnp.float32), self.config.layer.rms_norm_eps)
        assert self.regressive is not None  # the caller has checked
        return self.regressive.read(direction.astype(rows.dtype))

    def _output(self, frozen: Frozen, state: Array, position: int) -> Array:
        hidden = self.heads(state, position)
        if self.config.own_norm:
            return self.output_norm(hidden)
        return rms_norm(hidden, frozen.final_norm, self.config.layer.rms_norm_eps)


def make_config(
    base: BaseConfig,
    num_positions: int = CloverConfig.num_positions,
    rope: RopeConfig | None = None,
    loss: LossSpec = METHOD_LOSS,
    decoder_heads: int = 0,
    unit_states: bool = True,
    own_norm: bool = True,
    **options: Any,
) -> CloverConfig:
    """Return the head's config for a base; the rotary base is the base's own unless given.

    decoder_heads: heads of the Attention Decoder; 0 for the base's where these divide the width.
    """
    # The Augmenting Block starts as the base's last layer, so it has its shape.
    layer = layer_for(base, rope)
    if unit_states:
        # Branches that are normed, as Gemma's, cannot begin at nothing.
        layer = layer.with_plain_branches()
    return CloverConfig(
        layer=layer,
        decoder_heads=decoder_heads or default_heads(layer),
        unit_states=unit_states,
        own_norm=own_norm,
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        max_depth=num_positions,
        loss=loss,
        **options,
    )


def init_from_base(config: CloverConfig, params: Params, base_params: Params, rng: Array) -> Params:
    """Initialize so that the head starts as its Augmenting Block, a copy of the base's last layer.

    Queries and keys are the identity plus Gaussian noise, values zero. Residual blocks start at
    zero, the one in the decoder's place as well.
    """
    # The residual blocks add nothing at first, so that the head is its Augmenting Block.
    starts_as = silent_layers if config.unit_states else from_last_layer
    new: dict[str, Any] = starts_as(config, base_params, config.num_augmenting_layers)
    new["heads"] = jax.tree.map(jnp.zeros_like, params["heads"])
    if config.unit_states:
        new["state_size"] = initial_state_size(base_params)
    if config.own_norm:
        new["output_norm"] = base_params["final_norm"]
    if config.regressive_block == "attention_decoder":
        identity = jnp.eye(config.layer.hidden_size)
        both = jnp.stack([identity, identity])
        query, key = both + NOISE * jax.random.normal(rng, both.shape)
        # With values of zero the decoder adds nothing, whatever the cosines are.
        key_value = jnp.stack([key, jnp.zeros_like(identity)], axis=1)
        new["regressive"] = with_matrices(params["regressive"], query, key_value)
    elif config.regressive_block == "mlp":
        zeros = jnp.zeros_like(params["regressive"]["inward"])
        new["regressive"] = params["regressive"] | {"inward": zeros}
    return new
