"""Normalization, rotary positions and the gated MLP of the Llama family."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Float, Int
from clover_jax.config import LayerConfig, RopeConfig
from clover_jax.models.int8 import contract

CLAMP, CLAMPED_GAIN = 7.0, 1.702  # of the activation "clamped"


class RMSNorm(nn.Module):
    """x / rms(x) * scale, with the mean square taken in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return rms_norm(x, scale, self.eps)


def rms_norm(
    x: Float[Array, "*b D"], scale: Float[Array, "*c D"], eps: float
) -> Float[Array, "*b D"]:
    """Normalize the last axis of x to unit mean square, then scale (broadcast against x)."""
    # A sum of squares overflows bfloat16.
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * (wide * inverse).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angular frequencies of the pairs that are rotated, scaled as `rope.kind` says.

    Of "proportional" all pairs have one, which may be 0.

    Source: Hugging Face's rope_parameters; YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).
    """
    turned = int(head_dim * rope.share)
    size = head_dim if rope.kind == "proportional" else turned
    frequency = rope.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.kind == "longrope":
        frequency = frequency / np.array(rope.pair_factors)
    elif rope.kind == "yarn":
        # Pairs that turn often in the original length are kept, those that never do are stretched.
        pair, (first, last) = np.arange(size // 2), _passage(rope, size)
        stretched = np.clip((pair - first) / (last - first), 0.0, 1.0)
        frequency = frequency * (1 - stretched) + frequency / rope.factor * stretched
    elif rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "proportional":
        frequency = np.where(np.arange(size // 2) < turned // 2, frequency / rope.factor, 0)
    elif rope.kind == "llama3":
        # Slow frequencies are stretched, fast ones kept, those between blended.
        turns = rope.original_max_position_embeddings * frequency / (2 * np.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
    return frequency.astype(np.float32)


def _passage(rope: RopeConfig, size: int) -> tuple[float, float]:
    """Return YaRN's first and last pair of those between kept and stretched."""
    length = rope.original_max_position_embeddings
    first, last = (
        size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last if last != first else last + 0.001  # the reference's, against 0 / 0


def apply_rope(
    x: Float[Array, "B *n T H"], positions: Int[Array, "B T"], rope: RopeConfig
) -> Float[Array, "B *n T H"]:
    """Rotate each pair (x[j], x[j + n]) by position * frequency[j], in float32.

    n: the number of pairs: H/2, or half of the rotated part of a head (`rope.share`).
    """
    # A NumPy array, so a constant of the program: computed in float64 while tracing.
    frequency = inverse_frequencies(rope, x.shape[-1])
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = jnp.expand_dims(angle, tuple(range(1, x.ndim - 2)))  # broadcast over the head axes
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    if rope.attention_factor != 1:
        cosine, sine = cosine * rope.attention_factor, sine * rope.attention_factor
    # Both entries of a pair turn by one angle; they lie half of the rotated part apart.
    cosine, sine = (jnp.concatenate([each, each], axis=-1) for each in (cosine, sine))
    if cosine.shape[-1] < x.shape[-1]:
        # Some families leave a part of each head as it is.
        kept = [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] - cosine.shape[-1])]
        cosine, sine = jnp.pad(cosine, kept, constant_values=1), jnp.pad(sine, kept)
    ways = {"tpu": quarter_turn_by_product, "default": quarter_turn}
    ways = {name: functools.partial(way, num_pairs=len(frequency)) for name, way in ways.items()}
    turned = jax.lax.platform_dependent(x, **ways)
    return (x.astype(jnp.float32) * cosine + turned * sine).astype(x.dtype)


def quarter_turn(x: Float[Array, "*b H"], num_pairs: int) -> Float[Array, "*b H"]:
    """Return (-x[j + P], x[j]) for each pair j < P, in float32; 0 for entries without a pair."""
    first, second, rest = jnp.split(x.astype(jnp.float32), [num_pairs, 2 * num_pairs], axis=-1)
    return jnp.concatenate([-second, first, jnp.zeros_like(rest)], axis=-1)


def quarter_turn_by_product(x: Float[Array, "*b H"], num_pairs: int) -> Float[Array, "*b H"]:
    """Return `quarter_turn`, by a product with a matrix of 0, 1 and -1, which is exact.

    Halves of a head fill half of a TPU's lanes. By the compiler's estimate for a v6e, Llama 3 and
    416 slots, this takes 24 microseconds less a layer.
    """
    matrix = quarter_turn(jnp.eye(x.shape[-1]), num_pairs).astype(x.dtype)
    # One for each row of the batch: `train --remat` saves products with a single matrix.
    matrices = jnp.broadcast_to(matrix, (len(x), *matrix.shape))
    exact = jax.lax.Precision.HIGHEST  # or float32 would be rounded to bfloat16

    return jnp.einsum(
        "b...h,bhg->b...g", x, matrices, precision=exact, preferred_element_type=jnp.float32
    )


def activate(activation: str, gate: Float[Array, "*b F"]) -> Float[Array, "*b F"]:
    """Return the activation of an MLP's gate."""
    if activation == "silu":
        return jax.nn.silu(gate)
    if activation == "gelu":
        return jax.nn.gelu(gate)
    gate = jnp.minimum(gate, CLAMP)
    return gate * jax.nn.sigmoid(CLAMPED_GAIN * gate)


def let_through(activation: str, up: Float[Array, "*b F"]) -> Float[Array, "*b F"]:
    """Return the factor of an activated gate; gpt-oss bounds it and adds one."""
    return jnp.clip(up, -CLAMP, CLAMP) + 1 if activation == "clamped" else up


class GatedMLP(nn.Module):
    """down(activation(gate x) * up x), gate and up fused into one [D, 2, I] kernel."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        cfg = self.config
        width, inner = cfg.hidden_size, cfg.intermediate_size
        gate_up = self.param("gate_up", matrix_init(width), (width, 2, inner))
        down = self.param("down", matrix_init(inner), (inner, width))
        # One product reads x once. Of [B, T, D] a TPU pads each T to a multiple of 8.
        rows = x.reshape(-1, width)
        both = contract("rd,dcf->rcf", rows, gate_up)
        if cfg.mlp_bias:
            both = both + self.param("gate_up_bias", nn.initializers.zeros, (2, inner))
        kind = cfg.activation
        hidden = activate(kind, both[:, 0]) * let_through(kind, both[:, 1])
        hidden = contract("rf,fd->rd", hidden, down)
        if cfg.mlp_bias:
            hidden = hidden + self.param("down_bias", nn.initializers.zeros, (width,))
        return hidden.reshape(x.shape)


def matrix_init(fan_in: int):
    """Return a normal initializer of standard deviation 1 / sqrt(fan_in)."""
    return nn.initializers.normal(fan_in**-0.5)
