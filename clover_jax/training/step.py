"""One training step: teacher, head, loss, gradient, update; jitted once, its state donated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, LossSpec
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.meshes import AnyMesh, shape_of
from clover_jax.models.placement import (
    gathered,
    param_shardings,
    parts_of_rows,
    placed_as_params,
    replicated,
)
from clover_jax.training.losses import DEFAULT_CHUNK, LossMetrics, distillation_loss
from clover_jax.training.pairs import PairCounts, count_pairs, counted_pairs, sample_anchors
from clover_jax.training.teacher import TeacherOutput, teach

# name -> (peak, steps) -> a fall from the peak to 0.
SCHEDULES = {
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": optax.cosine_decay_schedule,
}

# Steps of L-BFGS on a fresh head's `linear_params`; on Gemma 3 270M the last three gain 0.1 nats.
FIT_STEPS = 8

# With `remat` the residuals are products with weights, not attention's, which grow with S^2.
KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer; the defaults are the release's but for `steps`.

    steps: optimizer steps, warm-up included; the rate falls to 0 at the last.
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
            make_schedule(config), b1=0.9, b2=config.b2, eps=1e-8, weight_decay=config.weight_decay
        ),
    )


class TrainState(struct.PyTreeNode):
    """What a step changes.

    params:    the head's, float32.
    opt_state: the optimizer's.
    step:      [] optimizer steps done.
    key:       key data of the run; each step folds its number in.
    """

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Array


class StepMetrics(struct.PyTreeNode):
    """What a step measured, before its update.

    loss: [] total loss.
    positions: its parts by draft position.
    gradient_norm: [] over all params, before clipping.
    """

    loss: Float[Array, ""]
    positions: LossMetrics
    gradient_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class TrainStepConfig:
    """The static part of a step.

    loss_chunk: targets per chunk of the loss, on each device.
    mesh: the devices that the arguments are split over; None: a single one.
    accumulation_steps: parts of a batch, whose gradients are summed before the update.
    remat: gradient checkpointing of the head: all that is not KEPT is computed again.
    """

    base: BaseConfig
    head: DraftHead
    optimizer: OptimizerConfig
    loss_chunk: int = DEFAULT_CHUNK
    mesh: AnyMesh | None = None
    accumulation_steps: int = 1
    remat: bool = False


def init_state(config: TrainStepConfig, base_params: Params, seed: int) -> TrainState:
    """Return the state before the first step; pure, so it can be jitted or shape-evaluated."""
    # One key for the params and one for all that the steps draw.
    init_key, key = jax.random.split(jax.random.key(seed))
    # In float32, whatever the base's dtype: small updates would be lost in bfloat16.
    params = registry.init_params(config.head, base_params, init_key)
    return TrainState(
        params=params,
        opt_state=make_optimizer(config.optimizer).init(params),
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(key),
    )


def head_loss(
    config: TrainStepConfig,
    params: Params,
    base_params: Params,
    teacher: TeacherOutput,
    batch: Batch,
    key: Array,
    counts: PairCounts | None = None,
) -> tuple[Float[Array, ""], LossMetrics]:
    """Return the head's loss on a batch, with its parts.

    The head computes in the teacher's dtype; its params and their gradient stay float32.
    counts: as in `distillation_loss`.
    """
    # Cast before they are gathered, so that half the bytes are sent in bfloat16.
    params = jax.tree.map(lambda leaf: leaf.astype(teacher.features.dtype), params)
    params = gathered(params, config.mesh)
    frozen = jax.lax.stop_gradient(frozen_from_base(base_params))

    # The head's own forward pass; with `remat` its backward pass computes most of it again.
    batch = _with_anchors(config, batch, key)
    forward: Callable[..., Any] = functools.partial(
        config.head.module.apply, method="train_forward"
    )
    if config.remat:
        forward = jax.checkpoint(forward, policy=KEPT)
    with jax.named_scope("head"):
        hidden = forward({"params": params}, frozen, teacher.features, batch, key)

    with jax.named_scope("loss"):
        return distillation_loss(
            config.head,
            params,
            frozen,
            hidden,
            teacher.states,
            batch,
            config.loss_chunk,
            # Groups of rows: one for every device that holds rows of its own.
            shape_of(config.mesh).num_row_shards,
            counts,
        )


def _with_anchors(config: TrainStepConfig, batch: Batch, key: Array) -> Batch:
    """Draw the places where a head trains, if it does not train at all positions."""
    count = config.head.module.num_anchors
    return batch.replace(anchors=sample_anchors(key, batch, count)) if count else batch


def fit_start(
    config: TrainStepConfig, state: TrainState, base_params: Params, batch: Batch
) -> TrainState:
    """Return a fresh state whose head is at least as good as guessing at every position of a batch.

    The cross-entropy is convex in the logits, so in what they are linear in, but for a soft cap:
    in the scale of a head that begins as a copy of the base, in the whole last norm of one whose
    layers begin at random.
    """
    module = config.head.module
    if not (module.scale_params or module.linear_params):
        return state
    # The cross-entropy alone, over the pairs that the method counts. Layers have no gradient here,
    # so `remat` would save nothing.
    method = config.head.config.loss
    loss = LossSpec(soft_ce=1.0, pairs=method.pairs, proposable=method.proposable)
    head = registry.head(dataclasses.replace(config.head.config, loss=loss))
    config = dataclasses.replace(config, head=head, remat=False)
    # One part of a batch fits in memory; all of them together may not.
    if config.accumulation_steps > 1:
        parts = parts_of_rows(batch, config.accumulation_steps, config.mesh)
        batch = jax.tree.map(lambda x: x[0], parts)

    @jax.jit
    def read(base_params: Params, batch: Batch) -> TeacherOutput:
        return teach(config.base, base_params, config.head.config.features, batch, config.mesh)

    def start_loss(
        base_params: Params, teacher: TeacherOutput, batch: Batch, key: Array, params: Params
    ) -> tuple[Float[Array, ""], LossMetrics]:
        whole = gathered(base_params, config.mesh)
        return head_loss(config, params, whole, teacher, batch, key)

    key = jax.random.wrap_key_data(state.key)
    # A pytree: what it holds is an argument of a jitted function, not a constant.
    start = jax.tree_util.Partial(start_loss, base_params, read(base_params, batch), batch, key)
    params = state.params
    if module.linear_params:
        params = _fit_linear(start, params, module.linear_params, config.mesh)
    params = _fit_scale(start, params, (*module.scale_params, *module.linear_params))
    return state.replace(params=params)


def _fit_scale(loss: jax.tree_util.Partial, params: Params, names: tuple[str, ...]) -> Params:
    """Go down from the scale that the params have, in steps of sqrt(1/2).

    This finds one where no position is worse than guessing, which is the loss at a scale of 0, and
    then the best for position 0, on which all others stand.
    """

    @jax.jit
    def soft_ce(loss: jax.tree_util.Partial, params: Params, scale: float) -> Float[Array, " P"]:
        return loss(_scaled(params, names, scale))[1].terms.soft_ce

    def losses_at(scale: float) -> np.ndarray:
        return np.asarray(soft_ce(loss, params, scale))

    # Not log Vd: the divisor counts tokens outside of a reduced vocabulary, and one more.
    guessing = losses_at(0.0)
    best, least = 1.0, math.inf
    for scale in (0.5 ** (0.5 * np.arange(30))).tolist():
        losses = losses_at(scale)
        # Below the smallest loss it only rises.
        if losses[0] >= least:
            break
        best = scale
        if (losses <= guessing).all():
            least = losses[0]
    return _scaled(params, names, best)


def _fit_linear(
    loss: jax.tree_util.Partial, params: Params, names: tuple[str, ...], mesh: AnyMesh | None
) -> Params:
    """Go from 0, where the head guesses, towards the least loss by L-BFGS.

    Logits of random layers say nothing of the targets, so their best scale is near 0, and AdamW
    moves a norm away from there by no more than its rate a step. With a weight for each channel
    they tell frequent tokens from rare ones.
    """
    solver = optax.lbfgs()

    @jax.jit
    def fit(loss: jax.tree_util.Partial, params: Params) -> Params:
        def value_of(leaves: Params) -> Float[Array, ""]:
            return loss(params | leaves)[0]

        def step(_: int, carry: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
            leaves, state = carry
            value, gradient = optax.value_and_grad_from_state(value_of)(leaves, state=state)
            updates, state = solver.update(
                gradient, state, leaves, value=value, grad=gradient, value_fn=value_of
            )
            return optax.apply_updates(leaves, updates), state

        leaves = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in names}
        leaves, _ = jax.lax.fori_loop(0, FIT_STEPS, step, (leaves, solver.init(leaves)))
        return placed_as_params(leaves, mesh)

    return params | fit(loss, params)


def _scaled(params: Params, names: tuple[str, ...], scale: float) -> Params:
    return params | {n: jax.tree.map(lambda leaf: scale * leaf, params[n]) for n in names}


class BatchGradient(NamedTuple):
    """The loss of a batch or of a part of it, its parts by position, its gradient by `params`."""

    loss: Float[Array, ""]
    positions: LossMetrics
    gradient: Params


def batch_gradient(
    config: TrainStepConfig,
    params: Params,
    base_params: Params,
    batch: Batch,
    key: Array,
    counts: PairCounts | None = None,
) -> BatchGradient:
    """Run the teacher and differentiate the head's loss; the arguments are `head_loss`'s."""
    features = config.head.config.features
    teacher = teach(config.base, base_params, features, batch, config.mesh)
    # Outside of the gradient, so that the teacher's activations are not kept as residuals.
    differentiate = jax.value_and_grad(head_loss, argnums=1, has_aux=True)
    # The loss reads few of these leaves; the compiler drops the gathers of the others.
    whole = gathered(base_params, config.mesh)
    (loss, positions), gradient = differentiate(config, params, whole, teacher, batch, key, counts)
    return BatchGradient(loss, positions, gradient)


def accumulated_gradient(
    config: TrainStepConfig, params: Params, base_params: Params, batch: Batch, key: Array
) -> BatchGradient:
    """Return the whole batch's loss and gradient, one part of its rows after another.

    The parts are divided by the whole batch's pairs, so they sum up to its loss. Where a method
    draws noise, each part draws its own.
    """
    parts = parts_of_rows(batch, config.accumulation_steps, config.mesh)
    operands = parts, jnp.arange(config.accumulation_steps)

    def pairs_of(operands: tuple[Batch, Array]) -> PairCounts:
        part, number = operands
        # With the key of the part's gradient: the anchors counted must be those trained at.
        part = _with_anchors(config, part, jax.random.fold_in(key, number))
        return count_pairs(counted_pairs(part, config.head.config), part)

    with jax.named_scope("count"):
        of_each = jax.lax.map(pairs_of, operands)
        counts = jax.tree.map(lambda count: count.sum(axis=0), of_each)

    def gradient_of(part: Batch, number: Array) -> BatchGradient:
        # What does not depend on the part is otherwise moved out of the loop: the whole base would
        # be gathered before it.
        base, part = jax.lax.optimization_barrier((base_params, part))
        # Its own key, or all parts would draw the same noise.
        part_key = jax.random.fold_in(key, number)
        return batch_gradient(config, params, base, part, part_key, counts)

    def add(total: BatchGradient, operands: tuple[Batch, Array]) -> tuple[BatchGradient, None]:
        total = jax.tree.map(jnp.add, total, gradient_of(*operands))
        # Summed as params lie at rest: a gathered sum would take as much memory on every device.
        return total._replace(gradient=placed_as_params(total.gradient, config.mesh)), None

    # The sum begins at zeros, of the shapes that one part's gradient has.
    first = jax.tree.map(lambda leaf: leaf[0], operands)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(gradient_of, *first)
    )
    return jax.lax.scan(add, zeros, operands)[0]


def train_step(
    config: TrainStepConfig, state: TrainState, base_params: Params, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """Make one optimizer step; jitted by `make_train_step`."""
    # By the step's number, not split from step to step: a resumed run draws the same.
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    differentiate = accumulated_gradient if config.accumulation_steps > 1 else batch_gradient
    loss, positions, gradient = differentiate(config, state.params, base_params, batch, key)

    with jax.named_scope("update"):
        optimizer = make_optimizer(config.optimizer)
        # The params too, for weight decay.
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    metrics = StepMetrics(loss, positions, gradient_norm=optax.tree.norm(gradient))
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics


def make_train_step(config: TrainStepConfig) -> jax.stages.Wrapped:
    """Return the compiled step `step(state, base_params, batch)`; it consumes `state`.

    On a mesh the new state lies where the old one did, and every device has the metrics.
    """

    def step(state: TrainState, base_params: Params, batch: Batch):
        new_state, metrics = train_step(config, state, base_params, batch)
        if config.mesh is None:
            return new_state, metrics
        # Constrained, because donated buffers can only be reused where the layouts agree.
        keep = jax.lax.with_sharding_constraint
        placed = keep(new_state, param_shardings(new_state, config.mesh))
        return placed, keep(metrics, replicated(config.mesh))

    return jax.jit(step, donate_argnums=0)
