"""Scores that are computed again for the gradient: the same values, and they are not kept."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from clover_jax.drafters import registry
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, batch_gradient, head_loss
from clover_jax.training.teacher import teach
from tests.tiny_models import DRAFTERS, TINY, init_head, random_base, random_head
from tests.training.training_data import random_batch

SIZE = 40  # of no other axis


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
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


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
        loss = functools.partial(head_loss, config)
        _, gradient, _ = jax.vjp(
            lambda params: loss(params, base, teacher, batch, jax.random.key(0)),
            params,
            has_aux=True,
        )
        return gradient

    leaves = jax.tree.leaves(jax.eval_shape(pull_back, params))
    return [x.shape for x in leaves if x.dtype.kind == "f" and x.shape.count(SIZE) == 2]
