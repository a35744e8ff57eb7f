"""The release's optimiser: AdamW, linear warm-up and decay, gradient values clipped."""

from __future__ import annotations

import dataclasses

import optax

from clover_jax.errors import UserError

# name -> (peak, steps) -> a fall from the peak to 0.
SCHEDULES = {
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": optax.cosine_decay_schedule,
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimiser; the defaults are the release's but for `steps`.

    steps: optimiser steps, warm-up included; the rate falls to 0 at the last.
    schedule: how it falls, one of SCHEDULES.
    clip_value: gradient values are clipped to [-clip_value, clip_value]; 0: not at all.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup_steps: int = 2000
    b2: float = 0.95
    weight_decay: float = 0.01
    clip_value: float = 0.5
    schedule: str = "linear"

    def __post_init__(self):
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise UserError(
                f"warmup_steps ({self.warmup_steps}) must lie between 0 and steps ({self.steps}), "
                "which must be at least 1"
            )
        if self.learning_rate <= 0:
            raise UserError(f"learning_rate ({self.learning_rate}) must be positive")
        # At 1 the mean of squared gradients never leaves 0, and the update divides by it.
        if not 0 <= self.b2 < 1:
            raise UserError(f"adam_b2 ({self.b2}) must be at least 0 and less than 1")
        if self.schedule not in SCHEDULES:
            raise UserError(f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return count -> rate: linear from 0 over the warm-up, then falling to 0 after the last step.

    The first step has rate 1 / warmup_steps of the peak: a step of rate 0 would be a step lost.
    Example: 4 steps, 2 of warm-up, peak 1 give 0.5, 1, 2/3, 1/3.
    """
    warmup, decay = config.warmup_steps, config.steps - config.warmup_steps
    # A warm-up of 0 steps still divides by its length.
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    # One step longer than the decay, or the run's last step would have rate 0.
    fall = SCHEDULES[config.schedule](config.learning_rate, decay + 1)
    return optax.join_schedules([lambda count: rise(count + 1), lambda n: fall(n + 1)], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return clipping by value followed by AdamW; weight decay acts on every parameter."""
    # Values, not the norm, as the release does.
    clip = optax.clip(config.clip_value) if config.clip_value else optax.identity()
    return optax.chain(
        clip,
        optax.adamw(
            make_schedule(config),
            b1=0.9,
            b2=config.b2,
            eps=1e-8,
            weight_decay=config.weight_decay,
        ),
    )
