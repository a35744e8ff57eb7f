"""Gated delta net: a layer that keeps a state of fixed size instead of keys and values.

For each token and value head, with decay g <= 0, strength beta, and a key of length 1:

    S <- exp(g) S,   u = beta (v - S^T k),   S <- S + k u^T,   output S^T q

A window of tokens is read at once, a chain or a tree. Let G_i be the sum of g from the window's
start down to token i. Then u solves a unit lower triangular system over each token's ancestors j:

    u_i + beta_i sum_j exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

So verification of a tree needs no state for each node: keys, u and g of the nodes are enough to
move the state along the accepted path. Queries, keys and values first pass a short causal
convolution along each token's ancestors. Everything but the products with weights is in float32.

Source: Gated Delta Networks (arXiv 2412.06464) as Qwen3-Next has them; the triangular system is the
chunked form of the delta rule (arXiv 2406.06484) with ancestors in the place of earlier tokens.

Small letters: h entries of a key, e of a value, c = 2 h + G e channels of the convolution for one
key head, which serves G value heads; w the inputs that the convolution looks back.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.config import DeltaConfig, LayerConfig
from clover_jax.models.int8 import Matrix, contract
from clover_jax.models.layers import RMSNorm, matrix_init

WINDOW = 64  # tokens of a long text that are read at once
# Products of states: on a TPU float32 would otherwise be rounded to bfloat16.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class DeltaState(struct.PyTreeNode):
    """What a layer knows of the committed text; it takes the place of a `KeyValue` in a cache.

    state: [B, K, G, e, h] S^T of each value head, float32: a TPU would re-lay S to move it.
    conv:  [B, K, w, c] the last inputs of the convolution, the newest one last; 0 before the text.
    """

    state: Float[Array, "B K G e h"]
    conv: Float[Array, "B K w c"]


class DeltaRows(struct.PyTreeNode):
    """What must be known of T tokens to move a state past some of them; float32 but for inputs.

    key: [B, K, T, h]. update: [B, K, T, G e] u. decay: [B, K, T, G] g. inputs: [B, K, T, c].
    """

    key: Float[Array, "B K T h"]
    update: Float[Array, "B K T n"]
    decay: Float[Array, "B K T G"]
    inputs: Float[Array, "B K T c"]


class Tokens(NamedTuple):
    """What the rule reads of T tokens, in float32; queries are scaled already."""

    query: Float[Array, "B K T h"]
    key: Float[Array, "B K T h"]
    value: Float[Array, "B K G T e"]
    strength: Float[Array, "B K G T"]
    decay: Float[Array, "B K G T"]


class DeltaNet(nn.Module):
    """The layer, called as `decoder.SelfAttention` is; `config.delta` has its shape."""

    config: LayerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: DeltaState | None,
        *_: Any,
    ) -> tuple[Float[Array, "B T D"], DeltaRows]:
        """Return the layer's output, and what moves its state.

        mask: which tokens are a token's ancestors, itself included; they have smaller numbers.
            Without a cache tokens follow each other in packed documents; with one, T tokens are one
            window of any shape.
        """
        net: Any = self.config.delta
        width = x.shape[-1]
        heads, groups, channels = net.num_key_heads, net.num_groups, net.channels
        inner = groups * net.value_size
        fused = self.param("delta_in", matrix_init(width), (width, heads, channels + inner))
        gates = self.param("delta_gates", matrix_init(width), (width, heads, 2 * groups))
        kernel = self.param(
            "delta_conv", matrix_init(net.conv_size), (net.conv_size, heads, channels)
        )
        rate = self.param("delta_rate", nn.initializers.zeros, (heads, groups))
        rate_bias = self.param("delta_rate_bias", nn.initializers.ones, (heads, groups))
        out = self.param("out", matrix_init(heads * inner), (heads, groups, net.value_size, width))

        # What the convolution reads, and the gate of the output.
        mask = jnp.broadcast_to(mask, (len(x), *mask.shape[1:]))
        projected = _by_head(x, fused)
        inputs, gate = projected[..., :channels], projected[..., channels:]
        state = empty_delta_state(net, len(x), x.dtype) if cache is None else cache
        read = jax.nn.silu(convolve(inputs, state.conv, kernel, mask))
        # Of another type than `projected`: for a GPU XLA joins products of one array with two
        # matrices if their results are alike, and writes both matrices as one at every step.
        gates = _by_head(x, gates, jnp.float32)
        tokens = _tokens(net, read, gates, rate, rate_bias)

        # A text has one window after another, a tree is one window.
        if cache is None:
            mixed, update = read_documents(tokens, mask, state.state)
        else:
            mixed, update = read_window(tokens, mask, state.state)
        rows = DeltaRows(
            key=tokens.key,
            update=_tokens_first(update),
            decay=jnp.moveaxis(tokens.decay, 2, 3),
            inputs=inputs,
        )

        # Each value head is normed by itself, then gated.
        normed = RMSNorm(self.config.rms_norm_eps, name="norm")(mixed.astype(x.dtype))
        gated = _tokens_first(normed) * jax.nn.silu(gate.astype(jnp.float32))
        flat = jnp.moveaxis(gated.astype(x.dtype), 2, 1).reshape(-1, heads * inner)
        # For a GPU XLA would fuse the transposition with the product, and fail where n is 1536.
        barrier = jax.lax.optimization_barrier
        flat = jax.lax.platform_dependent(flat, tpu=lambda y: y, default=barrier)
        return contract("rn,nd->rd", flat, out.reshape(-1, width)).reshape(x.shape), rows


def empty_delta_state(net: DeltaConfig, batch: int, dtype: jnp.dtype) -> DeltaState:
    """Return the states before `batch` texts."""
    heads = (batch, net.num_key_heads)
    state = (*heads, net.num_groups, net.value_size, net.key_size)
    conv = (*heads, net.conv_size - 1, net.channels)
    return DeltaState(jnp.zeros(state, jnp.float32), jnp.zeros(conv, dtype))


def _by_head(
    x: Float[Array, "B T D"], matrix: Matrix, dtype: jnp.dtype | None = None
) -> Float[Array, "B K T n"]:
    """Return x times a matrix [D, K, n], as it is stored: flat, a TPU would re-lay it."""

    def flat(x: Array, matrix: Matrix) -> Array:
        columns = contract("btd,dn->btn", x, matrix.reshape(x.shape[-1], -1), dtype)
        # A GPU sums the parts of a long product once, not for each of the columns' uses.
        columns = jax.lax.optimization_barrier(columns)
        return jnp.moveaxis(columns.reshape(*x.shape[:2], *matrix.shape[1:]), 2, 1)

    stored = functools.partial(contract, "btd,dkn->bktn", dtype=dtype)
    return jax.lax.platform_dependent(x, matrix, tpu=stored, default=flat)


def _tokens(
    net: DeltaConfig, read: Array, gates: Float[Array, "B K T n"], rate: Array, rate_bias: Array
) -> Tokens:
    """Split the convolution's output, and turn gates into strengths and decays."""
    size, groups = net.key_size, net.num_groups
    query, key, value = jnp.split(read, [size, 2 * size], axis=-1)
    value = jnp.moveaxis(value.reshape(*value.shape[:-1], groups, net.value_size), 3, 2)
    strength, step = jnp.split(jnp.moveaxis(gates, 3, 2), 2, axis=2)
    rate, rate_bias = (each.astype(jnp.float32)[..., None] for each in (rate, rate_bias))
    return Tokens(
        query=_unit(query) * size**-0.5,
        key=_unit(key),
        value=value,
        strength=jax.nn.sigmoid(strength),
        decay=-jnp.exp(rate) * jax.nn.softplus(step + rate_bias),
    )


def _unit(x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _tokens_first(x: Float[Array, "B K G T e"]) -> Float[Array, "B K T n"]:
    """Return the value heads of a key head side by side."""
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)


def parents(mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """Return each token's parent in a window, -1 where there is none: its last true ancestor.

    Example: mask rows [T,F,F], [T,T,F], [T,F,T] give [-1, 0, 0].
    """
    index = jnp.arange(mask.shape[-1])
    return jnp.where(mask & (index[:, None] != index), index, -1).max(axis=-1)


def convolve(
    inputs: Float[Array, "B K T c"],
    before: Float[Array, "B K w c"],
    kernel: Float[Array, "n K c"],
    mask: Bool[Array, "B T T"],
) -> Float[Array, "B K T c"]:
    """Return in float32 the sum over a token's last w + 1 inputs, times the kernel's rows.

    before: the inputs before the window, which a token reads where it has too few ancestors.
    """
    # A token's input follows those before the window, so parent -1 is the last one of them.
    source, back = jnp.concatenate([before.astype(inputs.dtype), inputs], axis=2), before.shape[2]
    parent = parents(mask)
    at = jnp.broadcast_to(jnp.arange(mask.shape[-1]), parent.shape)
    total = kernel[-1].astype(jnp.float32)[:, None] * inputs
    for distance in range(1, back + 1):
        above = jnp.take_along_axis(parent, jnp.maximum(at, 0), axis=1)
        at = jnp.where(at < 0, at - 1, above)
        row = jnp.take_along_axis(source, (at + back)[:, None, :, None], axis=2)
        total = total + kernel[-1 - distance].astype(jnp.float32)[:, None] * row
    return total


def read_window(
    tokens: Tokens,
    mask: Bool[Array, "B T T"],
    state: Float[Array, "B K G e h"],
    follows: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B K G T e"], Float[Array, "B K G T e"]]:
    """Return the output of each token of a window, and its u.

    mask: the ancestors of each token within the window, itself included.
    follows: which tokens continue the text of `state`; None: all.
    """
    # For each pair of a token and its ancestor, how much is left of what the ancestor wrote.
    total = _product("bij,bkgj->bkgi", mask.astype(jnp.float32), tokens.decay)
    pairs = mask[:, None, None]
    left = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))
    of_state = jnp.exp(total)
    if follows is not None:
        of_state = jnp.where(follows[:, None, None], of_state, 0)

    # Ancestors come first, so the system is triangular.
    known = _product("bkih,bkgeh->bkgie", tokens.key, state) * of_state[..., None]
    alike = _product("bkih,bkjh->bkij", tokens.key, tokens.key)[:, :, None]
    system = jnp.tril(tokens.strength[..., None] * left * alike, -1)
    right = tokens.strength[..., None] * (tokens.value - known)
    update = _product("bkgij,bkgje->bkgie", unit_inverse(system), right)

    asked = _product("bkih,bkjh->bkij", tokens.query, tokens.key)[:, :, None]
    output = _product("bkih,bkgeh->bkgie", tokens.query, state) * of_state[..., None]
    return output + _product("bkgij,bkgje->bkgie", left * asked, update), update


def unit_inverse(lower: Float[Array, "*b T T"]) -> Float[Array, "*b T T"]:
    """Return the inverse of I + a strictly lower triangular matrix, by products of matrices.

    A library's solver is a call that a mesh cannot split, and slow for many small matrices. Each
    step joins the inverses P and Q of two neighboring blocks on the diagonal; with C below the
    first, the inverse of both is [[P, 0], [-Q C P, Q]]. For keys of length 1 and strengths up to 1
    every part is as bounded as the rule itself, so rounding does not grow.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    span = 1
    while span < size:
        # Entries of the second half of each block of 2 span rows, below the first half.
        row, column = index[:, None] // span, index // span
        below = (row % 2 == 1) & (row - 1 == column)
        right = _product("...ij,...jk->...ik", jnp.where(below, lower, 0), inverse)
        # Set, not subtracted: libtpu 0.0.42 fails to compile such a product with a subtraction.
        inverse = jnp.where(below, -_product("...ij,...jk->...ik", inverse, right), inverse)
        span *= 2
    return inverse


def read_documents(
    tokens: Tokens, mask: Bool[Array, "B T T"], state: Float[Array, "B K G e h"]
) -> tuple[Float[Array, "B K G T e"], Float[Array, "B K G T e"]]:
    """Do the same as `read_window` for packed documents of any length, window after window.

    mask: as `decoder.packed_mask` returns it; a document's first token does not see the state.
    """
    size = mask.shape[-1]
    if size <= WINDOW:
        return read_window(tokens, mask, state)

    # Tokens [.., T, ..] as [windows, .., WINDOW, ..]; those added at the end see nothing.
    count = -(-size // WINDOW)
    more = count * WINDOW - size

    def divided(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])
        shape = (*x.shape[:axis], count, WINDOW, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    axes = (2, 2, 3, 3, 3)  # of the tokens, in each of the fields
    windows = Tokens(*map(divided, tokens, axes))
    # Within a window, and whether a token follows the one just before the window.
    rows = divided(mask, 1)
    starts = range(0, count * WINDOW, WINDOW)
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (1, more)))  # column 0: before the text
    own = jnp.stack([padded[n, :, :, s + 1 : s + 1 + WINDOW] for n, s in enumerate(starts)])
    follows = jnp.stack([padded[n, :, :, s] for n, s in enumerate(starts)])

    def read(state: Array, window: tuple[Tokens, Array, Array]) -> tuple[Array, tuple]:
        tokens, mask, follows = window
        output, update = read_window(tokens, mask, state, follows)
        # The next window follows the last token of this one, and its ancestors alone.
        path = mask[:, -1]
        decay = jnp.where(path[:, None, None], tokens.decay, 0)
        kept = follows[:, -1, None, None, None, None]
        moved = _moved(jnp.where(kept, state, 0), tokens.key, update, decay, path)
        return moved, (output, update)

    _, results = jax.lax.scan(read, state, (windows, own, follows))

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], -1, x.shape[-1])[..., :size, :]

    output, update = map(joined, results)
    return output, update


def _moved(
    state: Float[Array, "B K G e h"],
    key: Float[Array, "B K T h"],
    update: Float[Array, "B K G T e"],
    decay: Float[Array, "B K G T"],
    path: Bool[Array, "B T"],
) -> Float[Array, "B K G e h"]:
    """Return a state after the tokens of a path, which follow each other.

    decay: g, and 0 off the path.
    """
    # What a token wrote decays with each token after it.
    later = jnp.cumsum(decay[..., ::-1], axis=-1)[..., ::-1] - decay
    on_path = path[:, None, None, :, None]
    # Selected, since 0 times an infinity of a token off the path would be NaN.
    update = jnp.where(on_path, update * jnp.exp(later)[..., None], 0)
    key = jnp.where(path[:, None, :, None], key, 0)
    whole = jnp.exp(decay.sum(axis=-1))[..., None, None]
    return whole * state + _product("bkth,bkgte->bkgeh", key, update)


def move_state(old: DeltaState, rows: DeltaRows, count: Int[Array, " B"]) -> DeltaState:
    """Move each row's state past its first count[b] tokens of a path; with 0 it stays, bit for bit.

    rows: of a path [B, K, A, ..], as `cache.gather_rows` selects them.
    """
    # Value heads apart again, before tokens.
    groups = old.state.shape[2]
    update = rows.update.reshape(*rows.update.shape[:3], groups, -1)
    path = jnp.arange(rows.key.shape[2]) < count[:, None]
    decay = jnp.where(path[:, None, None], jnp.moveaxis(rows.decay, 3, 2), 0)
    state = _moved(old.state, rows.key, jnp.moveaxis(update, 3, 2), decay, path)

    # The last inputs along the path.
    inputs = jnp.concatenate([old.conv, rows.inputs.astype(old.conv.dtype)], axis=2)
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=old.conv.shape[2], axis=1)
    return DeltaState(state, jax.vmap(cut)(inputs, count))
