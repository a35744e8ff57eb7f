"""A batch in parts: the same loss and gradient as all at once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.training.step import (
    OptimizerConfig,
    TrainStepConfig,
    accumulated_gradient,
    batch_gradient,
)
from tests.tiny_models import TINY, init_head, random_base
from tests.training.training_data import random_batch

ALL_TERMS = LossSpec(regression=3.0, soft_ce=0.5, hard_ce=2.0, decay=0.7, divisor_offset=0.25)


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
    ("loss", "steps", "rounding"),
    [
        pytest.param(ALL_TERMS, 2, 2e-6, id="pairs"),
        pytest.param(dataclasses.replace(ALL_TERMS, divisor="positions"), 6, 2e-6, id="positions"),
        pytest.param(dataclasses.replace(ALL_TERMS, dpace=0.5), 3, 2e-6, id="D-PACE"),
    ],
)
def test_parts_sum_up_to_the_whole_batch(loss, steps, rounding):
    whole, summed = gradients(loss, steps)
    np.testing.assert_allclose(summed.loss, whole.loss, rtol=1e-6)
    np.testing.assert_array_equal(summed.positions.pairs, whole.positions.pairs)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rounding),
        summed.positions,
        whole.positions,
    )

    def close(part, of_all):
        assert np.abs(part - of_all).max() <= 3e-6 * np.abs(of_all).max()  # float32 sums

    jax.tree.map(close, summed.gradient, whole.gradient)
