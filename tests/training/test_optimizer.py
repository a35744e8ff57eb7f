import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.training.step import OptimizerConfig, make_optimizer, make_schedule


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


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(20\) must lie between 0 and"):
        OptimizerConfig(steps=10, warmup_steps=20)


def test_a_cosine_falls_slowly_at_first_and_to_0_after_the_last_step():
    config = OptimizerConfig(steps=5, learning_rate=1.0, warmup_steps=1, schedule="cosine")
    schedule = make_schedule(config)
    rates = [float(schedule(count)) for count in range(6)]
    expected = [1.0, *(0.5 * (1 + np.cos(np.pi * step / 5)) for step in range(1, 6))]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule 'step' is not one of linear, cosine"):
        OptimizerConfig(steps=5, warmup_steps=0, schedule="step")
