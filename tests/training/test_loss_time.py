"""How long the loss in chunks takes beside the same without, value and gradient; only reported.

python -m pytest -n0 -s -m slow tests/training/test_loss_time.py
"""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.shapes import base_shapes, random_params, shape_config
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.runtime.turns import time_in_turns
from clover_jax.training.losses import distillation_loss
from tests.training.reference import plain_loss
from tests.training.training_data import random_batch

ROWS, SIZE, POSITIONS = 2, 256, 5


@pytest.mark.slow
@pytest.mark.parametrize("base", ["shape:512x1x4096", "shape:256x1x16384"])
def test_chunks_cost_little_time(base, capsys):
    config = shape_config(base)
    head = registry.head(registry.config_for_base("clover2", config, num_positions=POSITIONS))
    base_params = base_shapes(config, jnp.float32)
    params = random_params(registry.init_shapes(head, base_params), seed=1)
    frozen = frozen_from_base(random_params(base_params, seed=0))
    batch = random_batch(ROWS, SIZE, config.vocab_size)
    # All targets count, so that both compute the same.
    batch = batch.replace(loss_mask=jnp.ones_like(batch.loss_mask))
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (POSITIONS, ROWS, SIZE, config.hidden_size))
    states = jax.random.normal(keys[1], (ROWS, SIZE, config.hidden_size))

    def timed(loss, **options):
        def value(hidden, frozen, states):
            return loss(head, params, frozen, hidden, states, batch, **options)

        compiled = jax.jit(jax.value_and_grad(value, has_aux=True))
        return functools.partial(compiled, hidden, frozen, states)

    runs = {str(size): timed(distillation_loss, chunk=size) for size in (64, 128, 256)}
    runs |= {"one chunk": timed(distillation_loss, chunk=ROWS * SIZE), "plain": timed(plain_loss)}
    values = {name: run()[0][0] for name, run in runs.items()}
    assert len({round(float(value), 3) for value in values.values()}) == 1
    seconds = time_in_turns(runs, rounds=5, single=runs)
    ratios = {name: round(taken / seconds["plain"], 3) for name, taken in seconds.items()}
    with capsys.disabled():
        print(json.dumps({"base": base, "plain_seconds": seconds["plain"], "ratios": ratios}))
