import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.drafters import registry
from clover_jax.models.batch import Batch
from clover_jax.training.step import (
    OptimizerConfig,
    TrainStepConfig,
    init_state,
    make_train_step,
    train_step,
)
from tests.tiny_models import LLAMA3_8B, TINY, random_base, random_head
from tests.training.training_data import random_batch


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


def test_the_second_step_compiles_nothing(compiled):
    step, traces = compiled
    state, _ = step(fresh_state(), random_base(), random_batch(seed=0))
    step(state, random_base(), random_batch(seed=1))
    assert len(traces) == 1


def test_three_steps_give_the_golden_losses(compiled):
    step, _ = compiled
    state, losses = fresh_state(), []
    for seed in range(3):
        state, metrics = step(state, random_base(), random_batch(seed=seed))
        losses.append(float(metrics.loss))
    assert losses == pytest.approx([24.07539, 22.50593, 23.08286], rel=1e-4), (
        "the first differs: the loss, the head or its initialisation changed; only later ones: "
        "the optimiser or its schedule did; if that was meant, write the new values here"
    )
    assert state.step == 3


def test_training_on_one_batch_lowers_its_loss(compiled):
    step, _ = compiled
    state, losses = fresh_state(), []
    for _ in range(10):
        state, metrics = step(state, random_base(), random_batch())
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.95 * losses[0]


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


@functools.cache  # once for all platforms
def traced_step(base, rows, size, loss_chunk):
    config = TrainStepConfig(
        base,
        registry.head(registry.config_for_base("clover2", base)),
        OptimizerConfig(10, 1e-3, 0),
        loss_chunk=loss_chunk,
    )
    base_params = base_shapes(base, jnp.bfloat16)
    state = jax.eval_shape(lambda base: init_state(config, base, 0), base_params)
    ids = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, size), bool))
    return make_train_step(config).trace(state, base_params, batch)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("base, rows, size", [(TINY, 2, 32), (LLAMA3_8B, 4, 2048)])
def test_the_step_lowers_for_accelerators_without_a_buffer_of_all_logits(
    platform, base, rows, size
):
    loss_chunk = min(512, rows * size // 4)
    traced = traced_step(base, rows, size, loss_chunk)
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
