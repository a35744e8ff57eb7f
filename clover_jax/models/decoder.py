"""The decoder of the Llama family: tokens in, hidden states and fresh keys and values out.

One call serves training (no cache, packed documents), prefill (a chunk after a cache) and
verification (a token tree after a cache): they differ in mask and positions only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import FLOAT32, Array, Bool, Float, Int, Params, typed
from clover_jax.config import BaseConfig, LayerConfig
from clover_jax.models.attention import attend
from clover_jax.models.cache import Cache, KeyValue
from clover_jax.models.delta_net import DeltaNet
from clover_jax.models.experts import ExpertMLP
from clover_jax.models.int8 import Int8Matrix, Matrix, contract
from clover_jax.models.layers import (
    GatedMLP,
    RMSNorm,
    activate,
    apply_rope,
    matrix_init,
    rms_norm,
)
from clover_jax.models.score_rules import ScoreRules, soft_cap
from clover_jax.models.top_k import argmax

MOST_LOGITS = 2**23  # logits that a GPU holds at a time: 32 MiB, which its cache can keep

# (query, fresh, fresh_mask, cache, length, rules) -> mixed values, as `attend` does it
Attend = Callable[..., Array]
# (a layer's number, its input) -> (its params, its input)
LayerParams = Callable[[int, Array], tuple[Params, Array]]


class DecoderOutput(struct.PyTreeNode):
    """The base's output for T positions.

    hidden: name -> [B, T, D]: "layer_0" .. (the state entering that layer), "pre_norm" (h,
        before the final norm), "post_norm" (g, after it). Unused ones cost nothing in jit.
    fresh: per layer with keys of its own, [B, K, T, H] keys and values of these positions, not in
        the cache, or the `DeltaRows` of a delta net.
    """

    hidden: dict[str, Array]
    fresh: Cache


class SelfAttention(nn.Module):
    """Grouped-query attention; q, k, v fused as [D, K, G + 2, H] so that heads shard on K.

    With gates of the output [D, K, 2 G + 2, H]: each query's gate follows it. Where keys serve as
    values [D, K, G + 1, H], and without keys of its own [D, K, G, H].
    """

    config: LayerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"] | None,
        cache: KeyValue | None,
        length: Int[Array, " B"] | None,
        attend: Attend = attend,
        shared: KeyValue | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return the attention output and the fresh keys and values.

        x: [B, T, D]; more than D columns for a head that reads more than its state.
        mask: None where `attend` decides which fresh positions a query sees.
        attend: may answer for the last positions only; the output is then theirs.
        shared: the fresh keys and values of the layer whose cache this one reads.
        """
        # One product gives queries, keys and values; heads stay whole on every shard of K.
        cfg = self.config
        width, groups = cfg.hidden_size, cfg.num_groups
        queries = 2 * groups if cfg.output_gate else groups  # each next to its gate
        columns = queries if cfg.shares_keys else queries + (1 if cfg.keys_as_values else 2)
        heads = (cfg.num_kv_heads, columns, cfg.head_dim)
        qkv = self.param("qkv", matrix_init(x.shape[-1]), (x.shape[-1], *heads))
        init = matrix_init(cfg.num_heads * cfg.head_dim)
        out = self.param("out", init, (cfg.num_kv_heads, groups, cfg.head_dim, width))
        # As it is stored: flat, a TPU would re-lay it.
        split_heads = functools.partial(contract, "btd,dkch->bkcth")
        fused = jax.lax.platform_dependent(x, qkv, tpu=split_heads, default=_split_columns)
        if cfg.qkv_bias:
            bias = self.param("qkv_bias", nn.initializers.zeros, heads)
            fused = fused + bias[:, :, None]

        # Separate from here on: as one rotated array, a TPU copies the queries next to their keys.
        query = fused[:, :, :queries]
        if shared is None:
            key, value = fused[:, :, queries], fused[:, :, columns - 1]
        else:
            key, value = shared.key, shared.value
        if cfg.output_gate:
            query, gate = query[:, :, ::2], query[:, :, 1::2]
        if cfg.query_key_norm:
            query = self._norm(query, "query_norm")
            key = self._norm(key, "key_norm") if shared is None else key
        if cfg.joint_head_norm:
            query = self._joint_norm(query, "queries_norm")
            key = self._joint_norm(key, "keys_norm")
        if cfg.value_norm and shared is None:
            value = rms_norm(value, jnp.ones((), value.dtype), cfg.rms_norm_eps)
        if not (cfg.alibi or cfg.unrotated):
            query = apply_rope(query, positions, cfg.rope)
            key = apply_rope(key, positions, cfg.rope) if shared is None else key

        # The new keys and values stay outside of the cache until they are accepted.
        fresh = KeyValue(key, value)
        sinks = None
        if cfg.sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (cfg.num_kv_heads, groups))
        rules = ScoreRules.of(cfg, positions, sinks)
        mixed = attend(query, fresh, mask, cache, length, rules)
        if cfg.output_gate:
            mixed = mixed * jax.nn.sigmoid(gate[..., -mixed.shape[3] :, :])
        # Both flattened: contracting three axes at once makes XLA transpose `out` at every step.
        heads_last = jnp.moveaxis(mixed, 3, 1).reshape(len(x) * mixed.shape[3], -1)
        result = contract("rn,nd->rd", heads_last, out.reshape(-1, width))
        if cfg.output_bias:
            result = result + self.param("out_bias", nn.initializers.zeros, (width,))
        return result.reshape(len(x), -1, width), fresh

    def _norm(self, x: Float[Array, "*b H"], name: str) -> Float[Array, "*b H"]:
        """Normalize each head by itself; all queries share one scale, all keys another."""
        scale = self.param(name, nn.initializers.ones, (self.config.head_dim,))
        return rms_norm(x, scale, self.config.rms_norm_eps)

    def _joint_norm(self, x: Float[Array, "B K *g T H"], name: str) -> Float[Array, "B K *g T H"]:
        """Normalize the heads of a token together; each has scales of its own."""
        scale = self.param(name, nn.initializers.ones, (*x.shape[1:-2], x.shape[-1]))
        # All that belongs to a token becomes one axis.
        tokens = jnp.moveaxis(x, -2, 1)
        flat = tokens.reshape(*tokens.shape[:2], -1)
        normed = rms_norm(flat, scale.reshape(-1), self.config.rms_norm_eps)
        return jnp.moveaxis(normed.reshape(tokens.shape), 1, -2)


def _split_columns(x: Float[Array, "B T D"], qkv: Matrix) -> Array:
    """Return x times `qkv` [D, K, c, H] as [B, K, c, T, H], by one product with a matrix.

    Otherwise XLA for CPU transposes `qkv`. Columns stay in the order of K: shards stay whole.
    """
    columns = contract("btd,dn->btn", x, qkv.reshape(x.shape[-1], -1))
    return jnp.einsum("btkch->bkcth", columns.reshape(*x.shape[:2], *qkv.shape[1:]))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, x + [norm] f(norm x); also the layer of the Augmenting Block.

    A delta net may take the place of attention.

    input_norm: False leaves out the norm before attention (EAGLE-1's layer).
    """

    config: LayerConfig
    input_norm: bool = True

    def setup(self):
        def norm(is_there: bool) -> Any:
            # A function without params, so a layer without a norm has no leaf for it.
            return RMSNorm(self.config.rms_norm_eps) if is_there else lambda x: x

        self.attention_norm = norm(self.input_norm and self.config.pre_norms)
        self.attention: Any = (DeltaNet if self.config.delta else SelfAttention)(self.config)
        self.mlp_norm = norm(self.config.pre_norms)
        has_experts = self.config.num_experts > 0
        self.is_parallel = has_experts and self.config.parallel_mlp
        replaced = has_experts and not self.is_parallel
        self.mlp = ExpertMLP(self.config) if replaced else GatedMLP(self.config)
        self.attention_post_norm = norm(self.config.post_norms)
        self.mlp_post_norm = norm(self.config.post_norms)
        if self.is_parallel:
            self.experts, self.experts_norm = ExpertMLP(self.config), norm(True)
            self.dense_post_norm, self.experts_post_norm = norm(True), norm(True)
        if self.config.scaled_output:
            self.scale = self.param("scale", nn.initializers.ones, (1,))
        if size := self.config.token_size:
            width = self.config.hidden_size
            self.token_gate = self.param("token_gate", matrix_init(width), (width, size))
            self.token_out = self.param("token_out", matrix_init(size), (size, width))
            self.token_post_norm = norm(True)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"] | None,
        cache: KeyValue | None = None,
        length: Int[Array, " B"] | None = None,
        attend: Attend = attend,
        shared: KeyValue | None = None,
        of_token: Float[Array, "B T P"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return the layer's output and its fresh keys and values.

        attend: decides which keys the queries see, where mask and cache do not suffice.
        shared: as `SelfAttention` has it.
        of_token: what gates the layer's further branch; None where it has none.
        """
        # B and T as one axis: of [B, T, D] a TPU pads each T to a multiple of 8.
        rows = x.reshape(-1, x.shape[-1])
        normed = self.attention_norm(rows).reshape(x.shape)
        mixed, fresh = self.attention(normed, positions, mask, cache, length, attend, shared)
        rows = rows + self.attention_post_norm(mixed.reshape(rows.shape))

        # An MLP, or experts, or both next to each other.
        given = self.mlp(self.mlp_norm(rows))
        if self.is_parallel:
            routed = self.experts(self.experts_norm(rows), rows)
            given = self.dense_post_norm(given) + self.experts_post_norm(routed)
        rows = rows + self.mlp_post_norm(given)

        # Last what the layer knows of the token by itself.
        if of_token is not None:
            gate = activate(self.config.activation, contract("rd,dp->rp", rows, self.token_gate))
            gated = gate * of_token.reshape(gate.shape)
            rows = rows + self.token_post_norm(contract("rp,pd->rd", gated, self.token_out))
        if self.config.scaled_output:
            rows = rows * self.scale
        return rows.reshape(x.shape), fresh


class Decoder(nn.Module):
    """The base model up to the final norm; `project` gives logits.

    layer_params: gathers a layer's split params just before it runs; None: they are whole.
    """

    config: BaseConfig
    layer_params: LayerParams | None = None

    def setup(self):
        cfg = self.config
        shape = (cfg.vocab_size, cfg.hidden_size)
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), shape)
        self.layers = [DecoderLayer(cfg.layer_at(i)) for i in range(cfg.num_layers)]
        self.final_norm = RMSNorm(cfg.rms_norm_eps)
        if size := cfg.num_layers * cfg.token_size:
            width, normal = cfg.hidden_size, nn.initializers.normal(0.02)
            self.token_embedding = self.param("token_embedding", normal, (cfg.vocab_size, size))
            self.token_projection = self.param(
                "token_projection", matrix_init(width), (width, size)
            )
            self.token_norm = RMSNorm(cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.lm_head = self.param("lm_head", nn.initializers.normal(0.02), shape)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: Cache | None = None,
        length: Int[Array, " B"] | None = None,
    ) -> DecoderOutput:
        """Read T tokens per row after length[b] committed positions.

        mask: [b, t, s] True where t may attend to the fresh position s (itself included).
        cache, length: the committed keys and values; None when there are none.
        """
        # Ids of padding slots are out of range; they are masked later.
        x = jnp.take(self.embedding, tokens, axis=0, mode="clip")
        x = scale_rows(x, self.config.embedding_scale)
        of_tokens = self._of_tokens(tokens, x) if self.config.token_size else None

        # Every layer's input is named: heads choose what they read, jit drops the rest.
        hidden: dict[str, Array] = {}
        fresh: list[Any] = []
        for index, layer in enumerate(self.layers):
            hidden[f"layer_{index}"] = x
            run: Callable[..., Any] = layer
            if self.layer_params is not None:
                params, x = self.layer_params(index, x)
                # A clone outside of this module, whose params are split: it gets gathered ones.
                run = functools.partial(layer.clone(parent=None).apply, {"params": params})

            # A layer without keys of its own reads an earlier one's, committed and fresh.
            source = self.config.layer_of_keys(index)
            committed = None if cache is None else cache[source]
            shared = None if source == index else fresh[source]
            of_token = None if of_tokens is None else of_tokens[:, :, index]
            more = {"shared": shared, "of_token": of_token}
            x, rows = run(x, positions, mask, committed, length, **more)
            if shared is None:
                fresh.append(rows)
        hidden["pre_norm"] = x
        hidden["post_norm"] = self.final_norm(x)
        return DecoderOutput(hidden=hidden, fresh=tuple(fresh))

    def _of_tokens(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """Return what every layer knows of the tokens: embeddings and projected inputs, mixed."""
        cfg = self.config
        shape = (*tokens.shape, cfg.num_layers, cfg.token_size)
        rows = jnp.take(self.token_embedding, tokens, axis=0, mode="clip").reshape(shape)
        projected = contract("btd,dn->btn", x, self.token_projection) * cfg.hidden_size**-0.5
        rows = scale_rows(rows, cfg.token_size**0.5)
        return (self.token_norm(projected.reshape(shape)) + rows) * 2**-0.5


def scale_rows(rows: Float[Array, "*b D"], scale: float) -> Float[Array, "*b D"]:
    """Return embeddings times a scale that is rounded to their dtype, as it was in training."""
    return rows if scale == 1 else rows * jnp.asarray(scale, rows.dtype)


@typed
def project(
    matrix: Float[Array, "V D"] | Int8Matrix, hidden: Float[Array, "*b D"], cap: float | None = None
) -> Float[Array, "*b V"]:
    """Return logits, hidden . matrix^T, accumulated and returned in float32.

    cap: the base's soft bound on logits, if it has one.

    The matrix is stored [V, D] so that it serves as embedding and as output without a
    transposed copy. Rows are flattened first: the search for the largest logits takes them flat,
    and a product that keeps its batch axes comes out in another layout on TPU, to be
    copied.
    """
    # One product of two matrices, whatever axes the states have.
    rows = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(matrix, Int8Matrix):
        logits = contract("rd,vd->rv", rows, matrix, FLOAT32)
    else:
        logits = _row_logits(matrix, rows)
    return soft_cap(logits, cap).reshape(*hidden.shape[:-1], matrix.shape[0])


def base_logits(
    config: BaseConfig, params: Params, hidden: Float[Array, "*b D"]
) -> Float[Array, "*b V"]:
    """Return the base's logits of its states after the final norm."""
    return project(_output_matrix(params), hidden, config.logit_cap)


def _output_matrix(params: Params) -> Matrix:
    return params.get("lm_head", params["embedding"])  # a tied base has one matrix for both


def base_choices(params: Params, hidden: Float[Array, "*b D"]) -> Int[Array, "*b"]:
    """Return the base's most probable token after each state, the lowest id among equals.

    A soft cap keeps the order of logits, so it is left out here.
    """
    matrix = _output_matrix(params)
    # On a mesh each device has a part already; a GPU would widen every part of int8 in memory.
    if jax.sharding.get_abstract_mesh().size > 1 or isinstance(matrix, Int8Matrix):
        return largest(matrix, hidden)
    return jax.lax.platform_dependent(
        matrix, hidden, cuda=largest_in_parts, rocm=largest_in_parts, default=largest
    )


def largest(matrix: Matrix, hidden: Float[Array, "*b D"]) -> Int[Array, "*b"]:
    """Return the id of the largest logit; on TPU the logits are reduced where they are made."""
    return argmax(project(matrix, hidden))


def largest_in_parts(matrix: Float[Array, "V D"], hidden: Float[Array, "*b D"]) -> Int[Array, "*b"]:
    """Return the same as `largest`, computed for one part of the vocabulary at a time.

    A GPU writes logits to memory before it compares them: for 16 rows of 26 slots and a vocabulary
    of 128k they are 203 MiB. Slices with constant bounds are read in place, a loop's are copied.
    """
    # Keep the best of the parts seen so far.
    shape, vocabulary = hidden.shape[:-1], matrix.shape[0]
    # Parts are about equal: a small last part would be merged with another one, and their matrices
    # copied side by side for that.
    count = math.ceil(hidden.size // hidden.shape[-1] * vocabulary / MOST_LOGITS)
    size = 1024 * math.ceil(vocabulary / (1024 * count))
    best, ids = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32)
    for start in range(0, vocabulary, size):
        logits = project(matrix[start : start + size], hidden)
        peak = logits.max(axis=-1)
        ids = jnp.where(peak > best, argmax(logits) + start, ids)  # an equal one later does not win
        best = jnp.maximum(best, peak)
    return ids


@jax.custom_vjp
def _row_logits(matrix: Float[Array, "V D"], rows: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Multiply; a gradient goes back through products in the operands' dtype.

    With the float32 gradient of float32 logits, products would run at half the rate or less.
    """
    return jnp.einsum("rd,vd->rv", rows, matrix, preferred_element_type=jnp.float32)


def _row_logits_backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    # Both products in the operands' dtype, with float32 sums.
    matrix, rows = operands
    gradient = gradient.astype(rows.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_matrix = product("rv,rd->vd", gradient, rows).astype(matrix.dtype)
    d_rows = product("rv,vd->rd", gradient, matrix).astype(rows.dtype)
    return d_matrix, d_rows


_row_logits.defvjp(
    lambda matrix, rows: (_row_logits(matrix, rows), (matrix, rows)), _row_logits_backward
)


@typed
def packed_mask(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Return the causal mask within documents: same segment and not later.

    Example: segment_ids [[1, 1, 2]] gives rows [T, F, F], [T, T, F], [F, F, T].
    """
    size = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Padding is a segment like others: each position sees itself, or its softmax would be empty.
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal


def causal_mask(batch: int, size: int) -> Bool[Array, "B S S"]:
    """Return the plain causal mask for `batch` rows of `size` positions."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
