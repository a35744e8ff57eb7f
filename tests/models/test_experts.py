"""Experts against one token after another, and what a token gets beside others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.experts import ExpertMLP
from clover_jax.models.int8 import Int8Matrix
from clover_jax.models.layers import activate
from clover_jax.quantization import quantize_params
from tests.tiny_models import TINY

CONFIG = dataclasses.replace(
    TINY, num_experts=5, experts_per_token=2, expert_size=24, expert_bias=True
).layer_at(0)
EXPERTS = ExpertMLP(CONFIG)
TOKENS = jax.random.normal(jax.random.key(1), (3, 7, CONFIG.hidden_size))


@pytest.fixture(scope="module")
def params():
    made = EXPERTS.init(jax.random.key(0), TOKENS)["params"]
    return {  # biases start at 0
        name: 0.3 * jax.random.normal(jax.random.key(i), leaf.shape)
        for i, (name, leaf) in enumerate(made.items())
    }


@jax.jit
def apply(params, tokens):
    return EXPERTS.apply({"params": params}, tokens)


def one_token(params, x):
    """Return what the equations say of one token."""
    scores = x @ params["router"] + params["router_bias"]
    best = np.argsort(-np.asarray(scores))[: CONFIG.experts_per_token]
    total = 0
    for expert, weight in zip(best, jax.nn.softmax(scores[best]), strict=True):
        gate, up = (
            x @ params[f"expert_{side}"][expert] + params[f"expert_{side}_bias"][expert]
            for side in ("gate", "up")
        )
        hidden = activate(CONFIG.activation, gate) * up
        total += weight * (hidden @ params["expert_down"][expert])
        total += weight * params["expert_down_bias"][expert]
    return total


def test_every_token_gets_its_experts(params):
    rows = TOKENS.reshape(-1, CONFIG.hidden_size)
    expected = jnp.stack([one_token(params, x) for x in rows]).reshape(TOKENS.shape)
    np.testing.assert_allclose(apply(params, TOKENS), expected, atol=1e-5)


def test_no_token_is_dropped_where_all_want_the_same_experts(params):
    wanted = params | {"router_bias": jnp.array([0.0, 50.0, 0.0, 40.0, 0.0])}
    row = TOKENS[0, 3]
    np.testing.assert_allclose(apply(wanted, TOKENS)[0, 3], one_token(wanted, row), atol=1e-5)


def test_a_token_alone_gets_what_it_gets_among_others(params):
    among = apply(params, TOKENS)
    for row, position in ((0, 0), (2, 6)):
        alone = apply(params, TOKENS[row : row + 1, position : position + 1])
        np.testing.assert_allclose(alone[0, 0], among[row, position], atol=1e-6)


def test_rounded_experts_compute_with_what_they_stand_for(params):
    rounded = quantize_params(params)
    names = [name for name, leaf in rounded.items() if isinstance(leaf, Int8Matrix)]
    assert names == ["expert_down", "expert_gate", "expert_up"]
    plain = rounded | {name: rounded[name].values * rounded[name].step for name in names}
    np.testing.assert_allclose(apply(rounded, TOKENS), apply(plain, TOKENS), atol=1e-4)
