"""Experts against one token after another, and what a token gets beside others."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.quantization import quantize_params
from clover_jax.models import experts
from clover_jax.models.experts import ExpertMLP
from clover_jax.models.int8 import Int8Matrix
from clover_jax.models.layers import activate
from experiments.aot.hlo import Program
from tests.tiny_models import TINY

CONFIG = dataclasses.replace(
    TINY, num_experts=5, experts_per_token=2, expert_size=24, expert_bias=True
).layer_at(0)
EXPERTS = ExpertMLP(CONFIG)
TOKENS = jax.random.normal(jax.random.key(1), (2, 2, CONFIG.hidden_size))


@pytest.fixture(scope="module")
def params():
    made = EXPERTS.init(jax.random.key(0), TOKENS)["params"]
    return {  # biases start at 0
        name: 0.3 * jax.random.normal(jax.random.key(i), leaf.shape)
        for i, (name, leaf) in enumerate(made.items())
    }


@pytest.fixture(params=["_chosen", "_all", "_all on a TPU", "_all_in_parts", "_grouped"])
def apply(request, monkeypatch):
    """The experts of TOKENS or of a part of them, by each of the ways."""
    name, _, on_tpu = request.param.partition(" on ")
    if on_tpu:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, tpu, default: tpu(*given))
    # 3 of the 4 tokens: two parts.
    most = {"_all_in_parts": 3, "_grouped": 0}.get(name, 10**6)
    monkeypatch.setattr(experts, "MOST_TOKENS", most)
    monkeypatch.setattr(experts, "MOST_PAIRS", 0)
    replaced = {"_chosen": "_all", "_grouped": "_all_in_parts"}.get(name, name)
    monkeypatch.setattr(experts, replaced, getattr(experts, name))
    return jax.jit(lambda params, tokens: EXPERTS.apply({"params": params}, tokens))


def test_the_way_follows_the_number_of_tokens(monkeypatch):
    seen = set()
    for name in ("_chosen", "_all", "_grouped", "_all_in_parts"):

        def way(activation, experts, routed, name=name):
            seen.add(name)
            return routed.tokens.astype(jnp.float32)

        monkeypatch.setattr(experts, name, way)
    for tokens, number, each, ways in (
        (1, 128, 8, {"_chosen"}),  # plain decoding of Qwen3-30B-A3B
        (26, 128, 8, {"_all"}),  # a tree of it
        (2, 8, 2, {"_all"}),  # Mixtral
        (1024, 128, 8, {"_grouped", "_all_in_parts"}),  # a prompt
    ):
        seen.clear()
        config = dataclasses.replace(CONFIG, num_experts=number, experts_per_token=each)
        x = jnp.zeros((tokens, CONFIG.hidden_size))
        jax.eval_shape(ExpertMLP(config).init, jax.random.key(0), x)
        assert seen == ways


def test_the_last_part_of_the_tokens_may_be_shorter(params, monkeypatch):
    tokens = jax.random.normal(jax.random.key(2), (1, 5, CONFIG.hidden_size))
    at_once = EXPERTS.apply({"params": params}, tokens)
    monkeypatch.setattr(experts, "MOST_TOKENS", 4)
    in_parts = EXPERTS.apply({"params": params}, tokens)
    np.testing.assert_allclose(in_parts, at_once, atol=1e-5)


def compiled(tokens):
    """Return the program for this many tokens of a base whose matrices have sizes of their own."""
    config = dataclasses.replace(CONFIG, hidden_size=40, expert_bias=False)
    model = ExpertMLP(config)
    given = jnp.zeros((1, tokens, 40))
    params = jax.eval_shape(model.init, jax.random.key(0), given)
    return jax.jit(model.apply).lower(params, given).compile()


@pytest.mark.parametrize("tokens", [12, 600], ids=["a tree", "a long prompt"])
def test_gate_and_up_of_the_experts_are_read_where_they_lie(tokens):
    program = Program(compiled(tokens).as_text())
    written = [array.sizes for _, one in program.instructions() for array in one.results]
    matrix = CONFIG.num_experts * 40 * CONFIG.expert_size
    # Down is laid out anew on a CPU, since its product sums over two axes.
    assert len([sizes for sizes in written if math.prod(sizes) == matrix]) <= 1


def test_many_tokens_take_no_more_than_all_experts_for_each():
    flops = 3 * compiled(1200).cost_analysis()["flops"]  # of three parts the compiler counts one
    assert flops < 1.2 * 1200 * CONFIG.num_experts * 6 * 40 * CONFIG.expert_size


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


def test_every_token_gets_its_experts(params, apply):
    rows = TOKENS.reshape(-1, CONFIG.hidden_size)
    expected = jnp.stack([one_token(params, x) for x in rows]).reshape(TOKENS.shape)
    np.testing.assert_allclose(apply(params, TOKENS), expected, atol=1e-5)
    # No token is dropped where all want the same experts.
    wanted = params | {"router_bias": jnp.array([0.0, 50.0, 0.0, 40.0, 0.0])}
    row = TOKENS[0, 1]
    np.testing.assert_allclose(apply(wanted, TOKENS)[0, 1], one_token(wanted, row), atol=1e-5)


def test_a_token_alone_gets_what_it_gets_among_others(params, apply):
    among = apply(params, TOKENS)
    for row, position in ((0, 0), (1, 1)):
        alone = apply(params, TOKENS[row : row + 1, position : position + 1])
        np.testing.assert_allclose(alone[0, 0], among[row, position], rtol=1e-6, atol=1e-6)


def test_rounded_experts_compute_with_what_they_stand_for(params, apply):
    rounded = quantize_params(params)
    names = [name for name, leaf in rounded.items() if isinstance(leaf, Int8Matrix)]
    assert names == ["expert_down", "expert_gate", "expert_up"]
    plain = rounded | {name: rounded[name].values * rounded[name].step for name in names}
    np.testing.assert_allclose(apply(rounded, TOKENS), apply(plain, TOKENS), atol=1e-4)


@pytest.mark.parametrize("apply", ["_chosen", "_all", "_all on a TPU"], indirect=True)
def test_what_an_expert_gives_that_was_not_chosen_is_left_out(params, apply):
    never = params | {"router_bias": jnp.array([0.0, 0.0, -jnp.inf, 0.0, 0.0])}
    spoilt = {name: leaf.at[2].set(jnp.inf) for name, leaf in never.items() if "gate" in name}
    np.testing.assert_array_equal(apply(never | spoilt, TOKENS), apply(never, TOKENS))


# Prints for each way the largest difference between a mesh and one device, and what is gathered.
ON_A_MESH = """
import json, re, sys
import jax, jax.numpy as jnp
from clover_jax.models import experts
from clover_jax.checkpoints.quantization import quantize_params
from clover_jax.models.meshes import make_mesh, parse_mesh
from clover_jax.models.placement import param_shardings, row_shardings
from tests.models.test_experts import CONFIG, EXPERTS, TOKENS

tokens = jnp.concatenate([TOKENS, -TOKENS])
params = EXPERTS.init(jax.random.key(0), tokens)["params"]
mesh = make_mesh(parse_mesh("data=2,tensor=4", 8))
experts.MOST_TOKENS = 4
for way in (experts._chosen, experts._all, experts._all_in_parts, experts._grouped):
    experts._way_for = lambda *counts: way
    for given in (params, quantize_params(params)):
        apply = jax.jit(lambda params, tokens: EXPERTS.apply({"params": params}, tokens))
        placed = jax.device_put(given, param_shardings(given, mesh))
        split = apply.lower(placed, jax.device_put(tokens, row_shardings(tokens, mesh))).compile()
        result = split(placed, jax.device_put(tokens, row_shardings(tokens, mesh)))
        gathered = re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* all-gather", split.as_text())
        print(json.dumps([float(abs(result - apply(given, tokens)).max()), gathered]))
"""


@pytest.mark.slow
def test_every_way_gives_on_a_mesh_what_it_gives_on_one_device(run_python):
    for line in run_python(ON_A_MESH, devices=8).splitlines():
        difference, gathered = json.loads(line)
        assert difference < 1e-5
        # The widths of matrices stay split; tokens may be sent.
        sizes = [[int(size) for size in shape.split(",") if size] for shape in gathered]
        assert [size for size in sizes if len(size) == 3 and CONFIG.expert_size in size] == []
