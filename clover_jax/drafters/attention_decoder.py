"""Clover's Attention Decoder: one attention step from a state to a single token embedding."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import LayerConfig
from clover_jax.models.int8 import contract
from clover_jax.models.layers import RMSNorm


class AttentionDecoder(nn.Module):
    """x + one attention step from x (query) to a single token embedding e (key and value).

    With one key per query a softmax would be constant: the weight of a head is the cosine
    similarity of its query and key, as in Clover-2's release (the papers' figures have no formula).

    bias: whether query, key and value have one. silu: whether the step's result goes through it.
    num_heads: 0 for heads as wide as the base's, of which Qwen3-0.6B (16 heads of 128 over a width
        of 1024) has 8 here.
    """

    config: LayerConfig
    bias: bool = True
    silu: bool = False
    num_heads: int = 0

    def setup(self):
        cfg = self.config
        width, count = cfg.hidden_size, self.num_heads or cfg.hidden_size // cfg.head_dim
        heads = (count, width // count)
        placeholder = nn.initializers.normal(0.02)  # init_from_base gives the method's own
        self.norm = RMSNorm(cfg.rms_norm_eps)
        self.query = self.param("query", placeholder, (width, *heads))
        self.key_value = self.param("key_value", placeholder, (width, 2, *heads))
        if self.bias:
            self.query_bias = self.param("query_bias", nn.initializers.zeros, heads)
            self.key_value_bias = self.param("key_value_bias", nn.initializers.zeros, (2, *heads))

    def __call__(
        self, x: Float[Array, "*b D"], embedded: Float[Array, "*b D"]
    ) -> Float[Array, "*b D"]:
        return self.mix(x, self.read(embedded))

    def read(self, embedded: Float[Array, "*b D"]) -> Float[Array, "*b 2 N H"]:
        """Return a token's keys and values, which depend on nothing else."""
        both = contract("...d,dcnh->...cnh", embedded, self.key_value)
        return both + self.key_value_bias if self.bias else both

    def mix(
        self, x: Float[Array, "*b D"], key_value: Float[Array, "*b 2 N H"]
    ) -> Float[Array, "*b D"]:
        """Mix what `read` returned into x."""
        query = contract("...d,dnh->...nh", self.norm(x), self.query)
        if self.bias:
            query = query + self.query_bias
        # Each head weighs its own part of the token by one number. In float32: cosines of bfloat16
        # lose the small differences that decide between tokens.
        key, value = key_value[..., 0, :, :], key_value[..., 1, :, :]
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        eps = self.config.rms_norm_eps
        cosine = (l2_normalize(query, eps) * l2_normalize(key, eps)).sum(axis=-1)
        # Back to the params' dtype: one float32 factor would make all that follows float32.
        mixed = (cosine.astype(value.dtype)[..., None] * value).reshape(x.shape)
        return x + (jax.nn.silu(mixed) if self.silu else mixed)


def l2_normalize(x: Float[Array, "*b H"], eps: float) -> Float[Array, "*b H"]:
    """Scale the last axis to length 1; vectors shorter than eps are divided by eps."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    # The clamp acts on the square, so that the gradient at x = 0 is 0 and not NaN.
    return x * jax.lax.rsqrt(jnp.maximum(square, eps * eps))


def default_heads(config: LayerConfig) -> int:
    """Return the head count of an Attention Decoder for a base's layer; 0 for heads of its width.

    Each head weighs its own part of a token by one number, so the heads must fill the width. Where
    the base's head_dim does not divide it, the decoder has as many heads as the base, or else the
    next smaller number that divides the width.

    Example: width 1024 in heads of 128 gives 0; Gemma 3 270M, width 640 and 4 heads of 256, 4.
    """
    width = config.hidden_size
    if width % config.head_dim == 0:
        return 0
    return next(n for n in range(min(config.num_heads, width), 0, -1) if width % n == 0)


def check_heads(config: LayerConfig, num_heads: int = 0) -> None:
    """Raise ValueError where the width does not split into the Attention Decoder's heads."""
    # A head narrower than the width would leave columns that nothing reads.
    if num_heads < 0 or (num_heads and config.hidden_size % num_heads):
        raise ValueError(
            f"decoder_heads ({num_heads}) must divide hidden_size ({config.hidden_size})"
        )
    if not num_heads and config.hidden_size % config.head_dim:
        raise ValueError(
            f"Attention Decoders split hidden_size ({config.hidden_size}) into heads, which "
            f"head_dim ({config.head_dim}) does not divide: set decoder_heads, for example "
            f"{default_heads(config)}"
        )


def with_matrices(
    params: Params, query: Float[Array, "D D"], key_value: Float[Array, "D 2 D"]
) -> Params:
    """Return an Attention Decoder's params with these matrices, given as [in, out]."""
    return {
        **params,
        "query": query.reshape(params["query"].shape),
        "key_value": key_value.reshape(params["key_value"].shape),
    }
