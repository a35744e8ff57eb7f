"""A mixture of experts: many gated MLPs, of which a router chooses a few for each token.

    p = softmax(W x)                                      over the experts, in float32
    y = sum over the k largest p_e of p_e down_e(activation(gate_e x) * up_e x)

Ways to compute y, by how many tokens there are; each token's own experts are always all
computed, so none is dropped, and a token's result does not depend on other tokens.

    chosen    one product after another for each pair of token and expert: few pairs read few
              matrices instead of all
    all       every token by every expert, with weight 0 for those that were not chosen. A tree of
              tokens needs nearly all matrices, and reading them takes longer than the products
    grouped   tokens sorted by expert, one grouped product: only the needed products, but TPUs may
              re-lay the matrices (experiments/results/compiled_decode_step.md).
              For a CPU or GPU XLA computes every pair by every expert, so there it is `all`, some
              tokens at a time
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.array_types import FLOAT32, Array, Float, Int
from clover_jax.config import LayerConfig
from clover_jax.models.int8 import Int8Matrix, Matrix, contract
from clover_jax.models.layers import GatedMLP, activate, let_through, matrix_init, rms_norm

MOST_PAIRS = 16  # that are written out one after another
MOST_TOKENS = 512  # whose products with all experts take as long as reading the matrices (v6e)


class Experts(NamedTuple):
    """The matrices of one layer's experts, [X, D, F] and [X, F, D], and their biases or None."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gate_bias: Float[Array, "X F"] | None = None
    up_bias: Float[Array, "X F"] | None = None
    down_bias: Float[Array, "X D"] | None = None


class Routed(NamedTuple):
    """Tokens, the experts that are chosen for each, and how much each of these counts."""

    tokens: Float[Array, "N D"]
    weight: Float[Array, "N k"]
    chosen: Int[Array, "N k"]


class ExpertMLP(nn.Module):
    """The experts of one layer and their router, and the expert that all tokens share, if any."""

    config: LayerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*b D"], state: Float[Array, "*b D"] | None = None
    ) -> Float[Array, "*b D"]:
        """Return what the experts give for x; the router reads x, or the state, which it norms."""
        cfg = self.config
        number, width, inner = cfg.num_experts, cfg.hidden_size, cfg.expert_size
        router = self.param("router", matrix_init(width), (width, number))

        # Each token's experts, and how much each counts.
        read = tokens = x.reshape(-1, width)
        if state is not None:
            scale = self.param("router_scale", nn.initializers.ones, (width,))
            read = rms_norm(state.reshape(-1, width), scale, cfg.rms_norm_eps) * width**-0.5
        if cfg.router == "sigmoid":
            weight, chosen = self._sigmoid_choice(tokens, router)
        else:
            scores = read @ router
            if cfg.expert_bias:
                scores = scores + self.param("router_bias", nn.initializers.zeros, (number,))
            probability = jax.nn.softmax(scores.astype(jnp.float32))
            weight, chosen = jax.lax.top_k(probability, cfg.experts_per_token)
        if cfg.normed_weights:
            weight = weight / weight.sum(axis=-1, keepdims=True)
        if cfg.routed_scale != 1:
            weight = weight * cfg.routed_scale
        if state is not None:
            scale = self.param("expert_scale", nn.initializers.ones, (number,))
            weight = weight * scale[chosen]

        # The params by their names, in the shapes that the functions below expect.
        shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        matrices = {
            side: self.param(f"expert_{side}", matrix_init(shape[0]), (number, *shape))
            for side, shape in shapes.items()
        }
        # Empty for a family without biases: the defaults of `Experts` are None.
        biases = {
            f"{side}_bias": self.param(
                f"expert_{side}_bias", nn.initializers.zeros, (number, shape[1])
            )
            for side, shape in shapes.items()
            if cfg.expert_bias
        }

        # At worst each pair reads another expert; up to a quarter of all, this beats reading all.
        given = Experts(**matrices, **biases), Routed(tokens, weight, chosen)
        if chosen.size <= min(MOST_PAIRS, number // 4):
            total = _chosen(cfg.activation, *given)
        elif len(tokens) <= MOST_TOKENS:
            total = _all(cfg.activation, *given)
        else:  # grouped products where the platform has them
            ways = {"tpu": _grouped, "default": _all_in_parts}
            paths = {name: functools.partial(way, cfg.activation) for name, way in ways.items()}
            total = jax.lax.platform_dependent(*given, **paths)
        if cfg.shared_expert_size:
            of_one = dataclasses.replace(cfg, intermediate_size=cfg.shared_expert_size)
            shared = GatedMLP(of_one, name="shared")(tokens)
            if cfg.shared_gate:
                gate = self.param("shared_gate", matrix_init(width), (width, 1))
                total = total + jax.nn.sigmoid(tokens @ gate).astype(jnp.float32) * shared
            else:
                total = total + shared.astype(jnp.float32)
        return total.astype(x.dtype).reshape(x.shape)

    def _sigmoid_choice(
        self, tokens: Float[Array, "N D"], router: Float[Array, "D X"]
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Return the weights of each token's experts and which they are."""
        cfg = self.config
        # In float32, as its models compute it: experts may be close.
        scores = jnp.einsum("nd,dx->nx", tokens, router, preferred_element_type=jnp.float32)
        probability = jax.nn.sigmoid(scores)
        bias = self.param("choice_bias", nn.initializers.zeros, (cfg.num_experts,))
        _, chosen = jax.lax.top_k(probability + bias.astype(jnp.float32), cfg.experts_per_token)
        return jnp.take_along_axis(probability, chosen, axis=-1), chosen


def _chosen(activation: str, experts: Experts, routed: Routed) -> Float[Array, "N D"]:
    """Return y, in float32, by the products of each pair of token and expert."""
    tokens, weight, chosen = routed
    totals = []
    for n in range(len(tokens)):
        # A matrix that is cut out of all goes into its product without a copy.
        total = jnp.zeros((1, tokens.shape[1]), jnp.float32)
        for j in range(chosen.shape[1]):
            at = functools.partial(jax.lax.dynamic_index_in_dim, index=chosen[n, j], keepdims=False)
            one = jax.tree.map(at, experts)
            hidden = _hidden(activation, one, "nd,df->nf", tokens[n : n + 1])
            given = contract("nf,fd->nd", hidden, one.down)
            if one.down_bias is not None:
                given = given + one.down_bias
            total = total + weight[n, j] * given.astype(jnp.float32)
        totals.append(total)
    return jnp.concatenate(totals)


def _hidden(
    activation: str, experts: Experts, spec: str, tokens: Float[Array, "N D"]
) -> Float[Array, "*x N F"]:
    """Return activation(gate_e x) * up_e x; spec: of the products, for one expert or for all."""
    sides = []
    for matrix, bias in ((experts.gate, experts.gate_bias), (experts.up, experts.up_bias)):
        side = contract(spec, tokens, matrix)
        sides.append(side if bias is None else side + bias[..., None, :])
    gate, up = sides
    return activate(activation, gate) * let_through(activation, up)


def _all(activation: str, experts: Experts, routed: Routed) -> Float[Array, "N D"]:
    """Return y, in float32, by products of all tokens with all experts."""
    tokens, weight, chosen = routed
    number = experts.gate.shape[0]
    weights = jnp.einsum("nk,nkx->nx", weight, jax.nn.one_hot(chosen, number, dtype=jnp.float32))

    # For one product a CPU or GPU would re-lay the matrices; on a TPU it saves 2 % of a step.
    hidden = jax.lax.platform_dependent(
        experts,
        tpu=lambda experts: _hidden(activation, experts, "nd,xdf->xnf", tokens),
        default=lambda experts: _hidden(
            activation, experts, "xnd,xdf->xnf", jnp.broadcast_to(tokens, (number, *tokens.shape))
        ),
    )

    # Weighted here: the last product sums over experts too. Infinities of others are left out.
    counts = weights.T[..., None]
    hidden = jnp.where(counts > 0, hidden * counts, 0).astype(tokens.dtype)
    if isinstance(experts.down, Int8Matrix):  # each expert has steps of its own
        total = contract("xnf,xfd->xnd", hidden, experts.down, FLOAT32).sum(axis=0)
    else:
        total = contract("xnf,xfd->nd", hidden, experts.down, FLOAT32)
    return total if experts.down_bias is None else total + weights @ experts.down_bias


def _all_in_parts(activation: str, experts: Experts, routed: Routed) -> Float[Array, "N D"]:
    """Return y, in float32, by products of all tokens with all experts, some tokens at a time."""
    tokens = len(routed.tokens)
    parts = math.ceil(tokens / MOST_TOKENS)
    size = math.ceil(tokens / parts)

    def divided(x: Array) -> Array:
        # A part has every parts-th token, so that a mesh that splits the tokens splits each part.
        x = jnp.pad(x, ((0, size * parts - tokens), (0, 0)))
        return jnp.moveaxis(x.reshape(size, parts, -1), 1, 0)

    given = jax.lax.map(lambda part: _all(activation, experts, part), jax.tree.map(divided, routed))
    return jnp.moveaxis(given, 0, 1).reshape(size * parts, -1)[:tokens]


def _grouped(activation: str, experts: Experts, routed: Routed) -> Float[Array, "N D"]:
    """Return y, in float32, by grouped products of the pairs of token and expert."""
    tokens, weight, chosen = routed
    # One row for each pair, sorted by expert.
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    expert, rows = expert[order], tokens[order // chosen.shape[1]]
    size = jnp.bincount(expert, length=experts.gate.shape[0])

    def product(rows: Array, matrix: Matrix, bias: Array | None) -> Array:
        if isinstance(matrix, Int8Matrix):
            values = matrix.values.astype(rows.dtype)
            wide = jax.lax.ragged_dot(rows, values, size, preferred_element_type=jnp.float32)
            result = (wide * matrix.step[expert, 0]).astype(rows.dtype)
        else:
            result = jax.lax.ragged_dot(rows, matrix, size)
        return result if bias is None else result + bias[expert]

    gate = product(rows, experts.gate, experts.gate_bias)
    up = product(rows, experts.up, experts.up_bias)
    hidden = activate(activation, gate) * let_through(activation, up)
    given = product(hidden, experts.down, experts.down_bias)

    # Back in the order of tokens, whose own experts are summed up in an order of their own.
    given = given[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum("nkd,nk->nd", given, weight, preferred_element_type=jnp.float32)
