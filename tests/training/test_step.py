"""One step: its optimizer, a batch in parts, gradient checkpointing, what is trained."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.models.batch import Batch
from clover_jax.training.step import (
    OptimizerConfig,
    TrainStepConfig,
    accumulated_gradient,
    batch_gradient,
    head_loss,
    init_state,
    make_optimizer,
    make_schedule,
    make_train_step,
    train_step,
)
from clover_jax.training.teacher import teach
from tests.tiny_models import DRAFTERS, LLAMA3_8B, TINY, init_head, random_base, random_head
from tests.training.training_data import random_batch

ALL_TERMS = LossSpec(regression=3.0, soft_ce=0.5, hard_ce=2.0, decay=0.7, divisor_offset=0.25)

SIZE = 40  # of no other axis


def test_schedule_gives_the_docstrings_example():
    schedule = make_schedule(OptimizerConfig(steps=4, learning_rate=1.0, warmup_steps=2))
    np.testing.assert_allclose([schedule(step) for step in range(4)], [1 / 2, 1, 2 / 3, 1 / 3])


def test_the_first_adamw_step_is_worked_out_by_hand():
    config = OptimizerConfig(steps=10, learning_rate=0.1, warmup_steps=0)
    optimizer = make_optimizer(config)
    params = {"w": jnp.array([2.0, 2.0])}
    gradient = {"w": jnp.array([100.0, -0.25])}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    # Bias-corrected moments of a first step make m / sqrt(v) the sign; decay adds 0.01 * 2.
    rate = make_schedule(config)(0)
    np.testing.assert_allclose(updates["w"], [-rate * 1.02, rate * 0.98], rtol=1e-5)


def test_gradient_values_are_clipped():
    params = {"w": jnp.zeros(2)}
    optimizer = make_optimizer(OptimizerConfig(steps=10, warmup_steps=0, clip_value=0.5))
    _, state = optimizer.update({"w": jnp.array([100.0, 0.1])}, optimizer.init(params), params)
    first_moment = next(s.mu["w"] for s in state[1] if hasattr(s, "mu"))
    np.testing.assert_allclose(first_moment, [0.05, 0.01], rtol=1e-5)


def test_a_warm_up_longer_than_the_run_and_an_unknown_schedule_are_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(20\) must lie between 0 and"):
        OptimizerConfig(steps=10, warmup_steps=20)
    with pytest.raises(ValueError, match="schedule 'step' is not one of linear, cosine"):
        OptimizerConfig(steps=5, warmup_steps=0, schedule="step")


def test_a_cosine_falls_slowly_at_first_and_to_0_after_the_last_step():
    config = OptimizerConfig(steps=5, learning_rate=1.0, warmup_steps=1, schedule="cosine")
    schedule = make_schedule(config)
    rates = [float(schedule(count)) for count in range(6)]
    expected = [1.0, *(0.5 * (1 + np.cos(np.pi * step / 5)) for step in range(1, 6))]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def tiny_config(chunk=16):
    return TrainStepConfig(TINY, random_head()[0], OptimizerConfig(10, 1e-3, 0), chunk)


@pytest.fixture(scope="module")
def compiled():
    """The compiled step, and a count of how often its Python ran."""
    traces = []

    def step(state, base_params, batch):
        traces.append(batch)
        return train_step(tiny_config(), state, base_params, batch)

    return jax.jit(step, donate_argnums=0), traces


def fresh_state(seed=0):
    config = tiny_config()
    return jax.jit(lambda base: init_state(config, base, seed))(random_base())


def test_three_steps_give_the_golden_losses_and_compile_once(compiled):
    step, traces = compiled
    state, losses = fresh_state(), []
    for seed in range(3):
        state, metrics = step(state, random_base(), random_batch(seed=seed))
        losses.append(float(metrics.loss))
    assert losses == pytest.approx([6.0447912, 4.9280391, 6.7515264], rel=1e-4), (
        "the first differs: the loss, the head or its initialization changed; only later ones: "
        "the optimizer or its schedule did; if that was meant, write the new values here"
    )
    assert (state.step, len(traces)) == (3, 1)


def test_the_base_survives_the_donated_state(compiled):
    step, _ = compiled
    before = jax.tree.map(np.array, random_base())
    step(fresh_state(), random_base(), random_batch())
    jax.tree.map(np.testing.assert_array_equal, before, random_base())


def test_state_is_float32_and_separate_from_a_bfloat16_base():
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_base())
    few = registry.config_for_base("clover2", TINY, num_positions=2)
    config = dataclasses.replace(tiny_config(), head=registry.head(few))
    state = jax.jit(init_state, static_argnums=(0, 2))(config, base, 0)
    new_state, metrics = jax.jit(lambda *a: train_step(config, *a))(state, base, random_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(new_state.params)} == {jnp.dtype("float32")}
    assert math.isfinite(metrics.loss)


def traced_step(base, rows, size, loss_chunk):
    head = registry.head(registry.config_for_base("clover2", base))
    config = TrainStepConfig(base, head, OptimizerConfig(10, 1e-3, 0), loss_chunk=loss_chunk)
    base_params = base_shapes(base, jnp.bfloat16)
    state = jax.eval_shape(lambda base: init_state(config, base, 0), base_params)
    ids = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, size), bool))
    return make_train_step(config).trace(state, base_params, batch)


@pytest.mark.parametrize("base, rows, size", [(TINY, 2, 32), (LLAMA3_8B, 4, 2048)])
def test_the_step_lowers_for_accelerators_without_a_buffer_of_all_logits(base, rows, size):
    loss_chunk = min(512, rows * size // 4)
    traced = traced_step(base, rows, size, loss_chunk)
    for platform in ("tpu", "cuda"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.while" in program
        largest = largest_vocabulary_array(program, base.vocab_size, base.hidden_size)
        assert largest == loss_chunk, f"{largest} x V logits exist at a time"


def largest_vocabulary_array(program, vocab_size, width):
    """Return how many vocabulary rows the largest array of logits holds, params left out.

    A param's gradient in one group of rows has the axis of groups, of one entry, before its own.
    """
    sizes = set()
    for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", program):
        shape = [int(n) for n in dims.rstrip("x").split("x")]
        axes = sorted(shape[1:] if shape[0] == 1 else shape)
        if vocab_size in shape and axes != sorted([vocab_size, width]):
            sizes.add(math.prod(shape) // vocab_size)
    return max(sizes)


def gradients(loss, steps):
    # The cheapest head to compile; on meshes it is Clover-2's turn (test_mesh.py).
    config = registry.config_for_base("medusa", TINY, num_positions=2)
    head = registry.head(dataclasses.replace(config, loss=loss))
    params = init_head(head, random_base(), jax.random.key(1))
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0), 16)
    parts = dataclasses.replace(config, accumulation_steps=steps)
    batch = random_batch(rows=6)  # of unequal documents, so that no two parts count as many pairs
    arguments = params, random_base(), batch, jax.random.key(0)
    whole = jax.jit(functools.partial(batch_gradient, config))(*arguments)
    summed = jax.jit(functools.partial(accumulated_gradient, parts))(*arguments)
    return whole, summed


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, 2), ({"divisor": "positions"}, 6), ({"dpace": 0.5}, 3)],
    ids=["pairs", "positions", "D-PACE"],
)
def test_parts_sum_up_to_the_whole_batch(changes, steps):
    loss = dataclasses.replace(ALL_TERMS, **changes)
    whole, summed = gradients(loss, steps)
    np.testing.assert_allclose(summed.loss, whole.loss, rtol=1e-6)
    np.testing.assert_array_equal(summed.positions.pairs, whole.positions.pairs)
    alike = functools.partial(np.testing.assert_allclose, rtol=2e-6)
    jax.tree.map(alike, summed.positions, whole.positions)

    def close(part, of_all):
        assert np.abs(part - of_all).max() <= 3e-6 * np.abs(of_all).max()  # float32 sums

    jax.tree.map(close, summed.gradient, whole.gradient)


@pytest.mark.parametrize(
    "name", ["clover2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("clover_lr", "eagle3"))]
)
def test_the_gradient_stays_the_same(name):
    kind, options = DRAFTERS[name]
    # Each position is compiled by itself.
    few = registry.config_for_base(kind, TINY, **(options | {"num_positions": 2}))
    head = registry.head(few)
    params = init_head(head, random_base(), jax.random.key(1))
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0), 16)
    arguments = params, random_base(), random_batch(rows=2, size=SIZE), jax.random.key(0)
    kept, again = (
        jax.jit(functools.partial(batch_gradient, c))(*arguments) for c in (config, remat(config))
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, again, kept)


@pytest.mark.parametrize("name", ["clover2", "eagle3"])
def test_no_layers_scores_are_kept(name):
    # By what differentiation hands on: XLA for CPU merges what is computed twice, so its memory
    # stays the same.
    head, params = random_head(name=name)
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0), 16)
    assert kept_scores(config, params)
    assert kept_scores(remat(config), params) == []


def remat(config):
    return dataclasses.replace(config, remat=True)


def kept_scores(config, params):
    """Return the shapes kept for the gradient that have a float for each pair of positions."""
    batch, base = random_batch(rows=2, size=SIZE), random_base()

    def pull_back(params):
        teacher = teach(TINY, base, config.head.config.features, batch)
        given = base, teacher, batch, jax.random.key(0)
        return jax.vjp(lambda p: head_loss(config, p, *given), params, has_aux=True)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pull_back, params))
    return [x.shape for x in leaves if x.dtype.kind == "f" and x.shape.count(SIZE) == 2]
