"""Pretraining of a small base: next-token loss, one step, the schedule, the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, packed_mask, project
from clover_jax.runtime.files import atomic_file
from experiments.tiny_base.muon import muon
from experiments.tiny_base.settings import PretrainConfig
from experiments.tiny_base.token_windows import TokenStream, Windows


class PretrainState(NamedTuple):
    """What a checkpoint holds.

    params, optimizer: pytrees of arrays.
    step: optimizer steps done; tokens: tokens read; seconds: wall-clock time spent.
    """

    params: Params
    optimizer: optax.OptState
    step: int
    tokens: int
    seconds: float


def token_loss(decoder: Decoder, params: Params, windows: Windows) -> Float[Array, "B S"]:
    """Return the cross-entropy of every target in nats, 0 where its weight is 0."""
    shape = windows.inputs.shape
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    mask = packed_mask(windows.segment_ids)
    hidden = decoder.apply({"params": params}, windows.inputs, positions, mask).hidden["post_norm"]
    logits = project(params["embedding"], hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows.targets)
    return losses * windows.weights


def init_params(base: BaseConfig, seed: int) -> Params:
    """Return random parameters; the matrices that write to the residual stream start at zero."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = Decoder(base).init(jax.random.key(seed), tokens, tokens, packed_mask(tokens))["params"]
    return jax.tree.map_with_path(
        lambda path, x: jnp.zeros_like(x) if path[-1].key in ("out", "down") else x, params
    )


@lru_cache
def make_step(base: BaseConfig, config: PretrainConfig) -> Callable:
    """Return `step(params, optimizer, windows, rate) -> params, optimizer, loss`, compiled."""
    decoder, transform = Decoder(base), _transform(config)

    def part_loss(params, part):
        return token_loss(decoder, params, part).sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, optimizer, windows, rate):
        def add_part(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(part_loss)(params, part)), None

        num_parts = windows.inputs.size // config.tokens_per_part
        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, x.shape[1]), windows)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, gradient), _ = jax.lax.scan(add_part, zero, parts)
        count = windows.weights.sum()
        gradient = jax.tree.map(lambda g: g / count, gradient)
        updates, optimizer = transform.update(gradient, optimizer, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return params, optimizer, loss / count

    return step


def init_state(base: BaseConfig, config: PretrainConfig) -> PretrainState:
    """Return the state before the first step."""
    params = init_params(base, config.seed)
    return PretrainState(params, _transform(config).init(params), 0, 0, 0.0)


def _transform(config: PretrainConfig) -> optax.GradientTransformation:
    return muon(config.embedding_learning_rate / config.learning_rate, config.weight_decay)


def save_state(path: Path, state: PretrainState) -> None:
    """Write a checkpoint atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(flax.serialization.to_bytes(jax.device_get(state)))


def load_state(path: Path, like: PretrainState) -> PretrainState:
    """Read a checkpoint of the same shapes as `like`."""
    return PretrainState(*flax.serialization.from_bytes(like, path.read_bytes()))


def progress_of(state: PretrainState, config: PretrainConfig) -> float:
    """Return how much of the run is done, 0 to 1, by steps or by time if that is further."""
    by_time = state.seconds / (60 * config.minutes) if config.minutes else 0.0
    return min(1.0, max(state.step / config.steps, by_time))


def pretrain(
    base: BaseConfig,
    config: PretrainConfig,
    stream: TokenStream,
    state: PretrainState,
    on_step: Callable[[PretrainState, float, float], None],
) -> PretrainState:
    """Run the remaining steps; `on_step(state, loss, progress)` sees the state after each.

    Raises:
      UserError: the loss is not finite.
    """
    step_function = make_step(base, config)
    spent_before, started = state.seconds, time.monotonic()
    while (progress := progress_of(state, config)) < 1:
        windows = stream.batch(state.step, config.length_at(progress))
        rate = config.learning_rate * config.rate_at(progress)
        params, optimizer, loss = step_function(state.params, state.optimizer, windows, rate)
        loss = float(loss)
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {state.step + 1}; use a lower --learning_rate"
            )
        seconds = spent_before + time.monotonic() - started
        tokens = state.tokens + windows.inputs.size
        state = PretrainState(params, optimizer, state.step + 1, tokens, seconds)
        on_step(state, loss, progress)
    return state
