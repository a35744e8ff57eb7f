"""Clover-2: a recurrent draft head with two Attention Decoders around an Augmenting Block.

Source: Clover-2 (arXiv 2408.00264) and the authors' release; where they disagree the choice is
noted. At position t, with h_t the base's state before its final norm and E the rows of lm_head:

    a_t = AttentionDecoder1(h_t, E[x_{t+1}])              information from the token comes early
    s^0 = z_t = trunk_norm(AugmentingBlock(a_0 .. a_t))   attention over the whole prefix
    u^0 = head_norm(W_0 s^0 + b_0)                        lm_head u^0 proposes x_{t+2}
    s^i = AttentionDecoder2(s^{i-1}, E[x_{t+1+i}])        the regressive connection
    u^i = head_norm(W_1 [s^i ; E[x_{t+1+i}]] + b_1)       lm_head u^i proposes x_{t+2+i}
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig, LossSpec, RopeConfig
from clover_jax.drafters.drafter import Frozen
from clover_jax.models.cache import Cache, after, init_cache, write_rows
from clover_jax.models.decoder import DecoderLayer, causal_mask, packed_mask, project
from clover_jax.models.layers import RMSNorm

NOISE = 0.01  # width of the release's uniform initialisation noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clover2Config(DrafterConfig):
    """A Clover-2 head. num_augmenting_layers: depth of the Augmenting Block (release: 2)."""

    kind: str = "clover2"
    num_augmenting_layers: int = 2

    def __post_init__(self):
        if self.num_positions < 1 or self.num_augmenting_layers < 1:
            raise ValueError(
                f"num_positions ({self.num_positions}) and num_augmenting_layers "
                f"({self.num_augmenting_layers}) must be at least 1"
            )
        if self.draft_to_target is not None:
            raise ValueError("Clover-2 drafts over the base's whole vocabulary: no draft_to_target")
        if self.layer.num_heads * self.layer.head_dim != self.layer.hidden_size:
            raise ValueError(
                f"Clover-2's Attention Decoders split hidden_size ({self.layer.hidden_size}) in "
                f"heads: num_heads ({self.layer.num_heads}) x head_dim ({self.layer.head_dim}) "
                "must equal it"
            )


@struct.dataclass
class Clover2State:
    """The recurrent state of W branches.

    state: [B, W, D] s^i.
    token: [B, W, D] embedding of the token that led here; unused at the root.
    """

    state: Float[Array, "B W D"]
    token: Float[Array, "B W D"]


class AttentionDecoder(nn.Module):
    """x + one attention step from x (query) to a single token embedding e (key and value).

    With one key per query a softmax would be constant: the weight of a head is the cosine
    similarity of its query and key, as in the release (the paper's figure has no formula).
    """

    config: LayerConfig

    def setup(self):
        cfg = self.config
        heads, width = (cfg.num_heads, cfg.head_dim), cfg.hidden_size
        placeholder = nn.initializers.normal(0.02)  # init_from_base gives the method's own
        self.norm = RMSNorm(cfg.rms_norm_eps)
        self.query = self.param("query", placeholder, (width, *heads))
        self.query_bias = self.param("query_bias", nn.initializers.zeros, heads)
        self.key_value = self.param("key_value", placeholder, (width, 2, *heads))
        self.key_value_bias = self.param("key_value_bias", nn.initializers.zeros, (2, *heads))

    def __call__(
        self, x: Float[Array, "*b D"], embedded: Float[Array, "*b D"]
    ) -> Float[Array, "*b D"]:
        """Mix the embedded token into x."""
        query = jnp.einsum("...d,dnh->...nh", self.norm(x), self.query) + self.query_bias
        both = jnp.einsum("...d,dcnh->...cnh", embedded, self.key_value) + self.key_value_bias
        key, value = both[..., 0, :, :], both[..., 1, :, :]
        # Back to the params' dtype: one float32 factor would make all that follows float32.
        weight = cosine_similarity(query, key, self.config.rms_norm_eps).astype(value.dtype)
        return x + (weight[..., None] * value).reshape(x.shape)


def cosine_similarity(
    query: Float[Array, "*b N H"], key: Float[Array, "*b N H"], eps: float
) -> Float[Array, "*b N"]:
    """Return q.k / (max(|q|, eps) max(|k|, eps)), each norm clamped by itself."""
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    similarity = _unit(query, eps) * _unit(key, eps)
    return similarity.sum(axis=-1)


def _unit(x: Array, eps: float) -> Array:
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    # The clamp acts on the square, so that the gradient at x = 0 is 0 and not NaN.
    return x * jax.lax.rsqrt(jnp.maximum(square, eps * eps))


class Clover2(nn.Module):
    """The Clover-2 head; see the module's docstring for the equations."""

    config: Clover2Config

    def setup(self):
        cfg = self.config
        width = cfg.layer.hidden_size
        matrix, zeros = nn.initializers.normal(width**-0.5), nn.initializers.zeros
        self.attention_decoder_1 = AttentionDecoder(cfg.layer)
        self.augmenting = [DecoderLayer(cfg.layer) for _ in range(cfg.num_augmenting_layers)]
        self.trunk_norm = RMSNorm(cfg.layer.rms_norm_eps)
        self.projector_0 = self.param("projector_0", matrix, (width, width))
        self.projector_0_bias = self.param("projector_0_bias", zeros, (width,))
        self.attention_decoder_2 = AttentionDecoder(cfg.layer)
        self.projector_1 = self.param("projector_1", matrix, (2, width, width))
        self.projector_1_bias = self.param("projector_1_bias", zeros, (width,))
        self.head_norm = RMSNorm(cfg.layer.rms_norm_eps)

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """Return the Augmenting Block's cache."""
        return init_cache(
            self.config.layer, self.config.num_augmenting_layers, batch, length, dtype
        )

    def absorb(
        self,
        frozen: Frozen,
        features: Float[Array, "B A F"],
        next_tokens: Int[Array, "B A"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        cache: Cache,
    ) -> tuple[Clover2State, Cache]:
        """Run the trunk over accepted positions; see the contract."""
        batch, size = next_tokens.shape
        positions = start[:, None] + jnp.arange(size)
        # Rows past count[b] come last, so the causal mask keeps them from the valid ones.
        z, fresh = self._trunk(
            frozen, features, next_tokens, positions, causal_mask(batch, size), cache, start
        )
        last = jnp.maximum(count - 1, 0)[:, None, None]
        root = jnp.take_along_axis(z, last, axis=1)
        cache = write_rows(cache, fresh, after(start, root))
        return Clover2State(state=root, token=jnp.zeros_like(root)), cache

    def propose(self, frozen: Frozen, state: Clover2State, depth: int) -> Float[Array, "B W V"]:
        """Return the logits of the tokens after each branch."""
        return self.logits(frozen, self._output(state, depth), depth)

    def advance(
        self,
        frozen: Frozen,
        state: Clover2State,
        cache: Cache,
        parent: Int[Array, "B W"],
        token: Int[Array, "B W"],
        depth: int,
    ) -> Clover2State:
        """Feed a drafted token back: the regressive connection."""
        above = jnp.take_along_axis(state.state, parent[..., None], axis=1)
        embedded = embed(frozen, token)
        return Clover2State(state=self.attention_decoder_2(above, embedded), token=embedded)

    def train_forward(
        self,
        frozen: Frozen,
        features: Float[Array, "B S F"],
        tokens: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        rng: Array | None = None,
    ) -> Float[Array, "P B S D"]:
        """Return u^i_t under teacher forcing; a segment's last i + 1 positions have no pair."""
        following = [embed(frozen, shift_left(tokens, i + 1)) for i in range(self.num_positions)]
        mask = packed_mask(segment_ids)
        z, _ = self._trunk(frozen, features, shift_left(tokens, 1), positions, mask, None, None)
        branch = Clover2State(state=z, token=following[0])
        outputs = [self._output(branch, 0)]
        for depth in range(1, self.num_positions):
            state = self.attention_decoder_2(branch.state, following[depth])
            branch = Clover2State(state=state, token=following[depth])
            outputs.append(self._output(branch, depth))
        if self.is_initializing() and self.num_positions == 1:
            self.attention_decoder_2(z, following[0])  # not trained, but a deeper tree needs it
        return jnp.stack(outputs)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D"], position: int
    ) -> Float[Array, "*b V"]:
        """Return lm_head u; the same frozen matrix at every position."""
        return project(frozen.lm_head, hidden)

    @property
    def num_positions(self) -> int:
        """Draft positions that are trained."""
        return self.config.num_positions

    def _trunk(self, frozen, features, next_tokens, positions, mask, cache, length):
        x = self.attention_decoder_1(features, embed(frozen, next_tokens))
        fresh = []
        for index, layer in enumerate(self.augmenting):
            x, rows = layer(x, positions, mask, None if cache is None else cache[index], length)
            fresh.append(rows)
        return self.trunk_norm(x), tuple(fresh)

    def _output(self, branch: Clover2State, depth: int) -> Float[Array, "B W D"]:
        if depth == 0:
            x = branch.state @ self.projector_0 + self.projector_0_bias
        else:
            x = branch.state @ self.projector_1[0] + branch.token @ self.projector_1[1]
            x = x + self.projector_1_bias
        return self.head_norm(x)


def embed(frozen: Frozen, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Return the tokens' rows of lm_head, Clover-2's token embedding."""
    return jnp.take(frozen.lm_head, tokens, axis=0, mode="clip")


def shift_left(tokens: Int[Array, "B S"], by: int) -> Int[Array, "B S"]:
    """Shift so that slot t holds x_{t+by}, with 0 beyond the end.

    Example: [[5, 6, 7]] shifted by 1 is [[6, 7, 0]].
    """
    return jnp.pad(tokens[:, by:], ((0, 0), (0, min(by, tokens.shape[1]))))


def make_config(
    base: BaseConfig,
    num_positions: int = 5,
    num_augmenting_layers: int = 2,
    rope: RopeConfig | None = None,
    loss: LossSpec | None = None,
) -> Clover2Config:
    """Return the head's config for a base; the rotary base is the base's own unless given.

    The loss defaults to the method's: 10 x regression + soft cross-entropy, weighted 0.7^i.
    """
    layer = dataclasses.replace(base.layer, rope=rope or base.rope)
    return Clover2Config(
        layer=layer,
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        num_augmenting_layers=num_augmenting_layers,
        loss=loss or LossSpec(regression=10.0, soft_ce=1.0, decay=0.7),
    )


def init_from_base(
    config: Clover2Config, params: Params, base_params: Params, rng: Array
) -> Params:
    """Initialise as the paper says: the Augmenting Block from the base's last layer.

    (The release copies layer 0, because it reads the layer count from the draft's config.)
    Norms before the outputs take the base's final norm; queries, keys and projectors start as
    the identity, values at zero, all plus U(0, 0.01); biases start at 0.
    """
    layers = [name for name in base_params if name.startswith("layers_")]
    last = max(int(name.removeprefix("layers_")) for name in layers)
    final_norm = base_params["final_norm"]
    layer = config.layer
    width, heads = layer.hidden_size, (layer.num_heads, layer.head_dim)
    identity = jnp.eye(width)
    keys = iter(jax.random.split(rng, 6))

    def noisy(matrix: Array) -> Array:
        return matrix + jax.random.uniform(next(keys), matrix.shape, maxval=NOISE)

    def attention_decoder(old: Params) -> Params:
        query = noisy(identity).reshape(width, *heads)
        key_value = noisy(jnp.stack([identity, jnp.zeros_like(identity)], axis=1))
        new = {"query": query, "key_value": key_value.reshape(width, 2, *heads)}
        return {**old, **new}

    new: dict[str, Any] = {
        f"augmenting_{i}": base_params[f"layers_{last}"]
        for i in range(config.num_augmenting_layers)
    }
    new |= {name: attention_decoder(params[name]) for name in _ATTENTION_DECODERS}
    new |= {"trunk_norm": final_norm, "head_norm": final_norm}
    new["projector_0"] = noisy(identity)
    new["projector_1"] = noisy(jnp.stack([identity, jnp.zeros_like(identity)]))
    return jax.tree.map(lambda old, x: jnp.array(x, old.dtype), params, {**params, **new})


_ATTENTION_DECODERS = ("attention_decoder_1", "attention_decoder_2")
