"""Layers over blocks of slots: attention to the text and to their own block, with convolutions.

Attention goes from a slot to c_0 .. c_t, the states of the text, and to all slots of its own block,
at their true positions. The same matrices make keys and values of both; c's are cached,
the slots' never. With x = norm(h), in every layer

    h += after(attention(before(x)))
    h += after(mlp(before(x)))

`before` and `after` are convolutions over the slots of the block. Their kernels follow x and are
shared by g neighboring channels; y is 0 before slot 0:

    conv(y)_k = sum_o (base[o] + (W x_k)[o]) * y_{k-o}   o = 0, 1

W [D, 2, 2, D / g]. At first a convolution passes on what it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.config import LayerConfig
from clover_jax.models.attention import RunningSoftmax, attend, attend_rows, finish
from clover_jax.models.cache import KeyValue
from clover_jax.models.decoder import Attend, SelfAttention
from clover_jax.models.int8 import contract
from clover_jax.models.layers import GatedMLP, RMSNorm


class BlockShape(NamedTuple):
    """What is static about blocks.

    size: slots of one.
    conv_taps: slots that a convolution reads; 0 leaves it out.
    conv_group: g, channels that share a kernel.
    """

    size: int
    conv_taps: int
    conv_group: int


class BlockConvolution(nn.Module):
    """Two convolutions over the slots of blocks, whose kernels follow one state."""

    shape: BlockShape

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """Return the one before and the one after a sublayer that reads x, as functions."""
        taps, width = self.shape.conv_taps, x.shape[-1]
        if not taps:
            return _same, _same

        # d = W x is computed once for both, from the state before the sublayer.
        shape = (width, 2, taps, width // self.shape.conv_group)
        base = self.param(
            "base_kernel", lambda _, shape: jnp.zeros(shape).at[:, 0].set(1), (2, taps, width)
        )
        kernel = contract(
            "btd,djog->btjog", x, self.param("kernel_projection", nn.initializers.zeros, shape)
        )
        before, after = (
            functools.partial(convolve, base=base[j], kernel=kernel[:, :, j], size=self.shape.size)
            for j in range(2)
        )
        return before, after


def _same(y: Array) -> Array:
    return y


def convolve(
    y: Float[Array, "B T D"], base: Float[Array, "o D"], kernel: Float[Array, "B T o g"], size: int
) -> Float[Array, "B T D"]:
    """Return sum_o (base[o] + kernel_k[o]) * y_{k-o} within blocks of `size` slots.

    kernel: of each slot, one entry for D / g neighboring channels.
    """
    batch, _, width = y.shape
    blocks, total = y.reshape(batch, -1, size, width), jnp.zeros_like(y)
    # A mesh has a part of each kernel on a device, and a product would sum over the parts.
    on_mesh = jax.sharding.get_abstract_mesh().size > 1
    paths = {"default": _repeated, "tpu": _repeated if on_mesh else _placed}
    paths = {name: functools.partial(path, width=width) for name, path in paths.items()}
    by_channel = jax.lax.platform_dependent(kernel, **paths)
    # Shifted within each block, so that no slot reads a slot of another block.
    for back in range(len(base)):
        earlier = jnp.pad(blocks, ((0, 0), (0, 0), (back, 0), (0, 0)))[:, :, :size]
        total += (base[back] + by_channel[:, :, back]) * earlier.reshape(y.shape)
    return total


def _repeated(kernel: Float[Array, "*b g"], width: int) -> Float[Array, "*b D"]:
    return jnp.repeat(kernel, width // kernel.shape[-1], axis=-1)


def _placed(kernel: Float[Array, "*b g"], width: int) -> Float[Array, "*b D"]:
    """Return the same by a product, which is exact.

    A TPU lays repeated entries out 16 to a line of 128 first: 0.4 ms a layer for 16 rows (the
    compiler's estimate for a v6e).
    """
    groups = jnp.arange(kernel.shape[-1])
    place = groups[:, None] == jnp.arange(width) // (width // len(groups))
    exact = jax.lax.Precision.HIGHEST  # or float32 would be rounded to bfloat16
    return jnp.einsum("...g,gd->...d", kernel, place.astype(kernel.dtype), precision=exact)


class BlockLayer(nn.Module):
    """Attention from slots to the context and their block, and an MLP; convolutions around both."""

    layer: LayerConfig
    shape: BlockShape

    def setup(self):
        layer = self.layer
        self.attention_norm = RMSNorm(layer.rms_norm_eps)
        self.attention_conv = BlockConvolution(self.shape)
        self.attention = SelfAttention(layer)
        self.mlp_norm = RMSNorm(layer.rms_norm_eps)
        self.mlp_conv = BlockConvolution(self.shape)
        self.mlp = GatedMLP(layer)

    def __call__(
        self,
        context: Float[Array, "B A D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B A+T"],
        attend: Attend,
        cache: KeyValue | None,
        length: Int[Array, " B"] | None,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return the slots' states, and the keys and values of context and slots."""
        # Context and slots go through one product, so that its matrix is read once.
        x = self.attention_norm(hidden)
        before, after = self.attention_conv(x)
        read = jnp.concatenate([context, before(x)], axis=1)
        mixed, fresh = self.attention(read, positions, None, cache, length, attend)
        hidden = hidden + after(mixed)

        x = self.mlp_norm(hidden)
        # Each sublayer has convolutions of its own, with kernels made from the state that it reads.
        before, after = self.mlp_conv(x)
        return hidden + after(self.mlp(before(x))), fresh


def attend_last(
    query: Float[Array, "B K G A+T H"],
    fresh: KeyValue,
    _: None,
    cache: KeyValue | None,
    length: Int[Array, " B"] | None,
    rules: None,
    *,
    seen: Bool[Array, "B A+T"],
    size: int,
) -> Float[Array, "B K G T H"]:
    """Attend from the last `size` rows, a block's slots, to what is seen and to the cache."""
    mask = jnp.repeat(seen[:, None], size, axis=1)  # all slots see alike
    # One product made queries of the context's rows too; only the slots' are wanted.
    return attend(query[:, :, :, -size:], fresh, mask, cache, length)


def attend_blocks(
    query: Float[Array, "B K G S+T H"], fresh: KeyValue, *_: None, seen: Bool[Array, "B M S"]
) -> Float[Array, "B K G T H"]:
    """Attend from the slots of M blocks, each to its own block and to what it sees of the text.

    fresh: the keys and values of the text's S positions, then of the slots, block by block.
    """
    # Queries of the text's rows are dropped: only their keys and values are used.
    num_blocks, size = seen.shape[1:]
    query = query[:, :, :, size:]
    text = jax.tree.map(lambda x: x[:, :, :size], fresh)
    flat = query.shape[:4]

    # The block itself, as one small softmax of its own: in float32, since a CPU has no such
    # products of bfloat16.
    blocks = (num_blocks, flat[3] // num_blocks, query.shape[-1])
    own_query = query.reshape(*flat[:3], *blocks).astype(jnp.float32)
    key, value = (
        x[:, :, size:].reshape(*flat[:2], *blocks).astype(jnp.float32)
        for x in (fresh.key, fresh.value)
    )
    scores = jnp.einsum("bkgmth,bkmsh->bkgmts", own_query, key) * query.shape[-1] ** -0.5
    peak = scores.max(axis=-1)
    weight = jnp.exp(scores - peak[..., None])
    mixed = jnp.einsum("bkgmts,bkmsh->bkgmth", weight, value)
    own = RunningSoftmax(
        peak.reshape(flat), weight.sum(axis=-1).reshape(flat), mixed.reshape(*flat, -1)
    )

    # Then the text, which all slots of a block see alike.
    mask = jnp.repeat(seen, blocks[1], axis=1)[:, None, None]
    return finish(attend_rows(query, text, mask, own), query.dtype)
