"""The training loop: batches in, a trained state out; what happens every so often on the way."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import grain
import jax

from clover_jax.array_types import Params
from clover_jax.data.batch import Batch
from clover_jax.errors import UserError
from clover_jax.runtime.progress import Progress
from clover_jax.storage.checkpoint import Checkpoints
from clover_jax.training.metrics import MetricsLog
from clover_jax.training.step import StepMetrics, TrainState

TrainStep = Callable[[TrainState, Params, Batch], tuple[TrainState, StepMetrics]]


@dataclasses.dataclass
class Trainer:
    """What the loop works with.

    place: puts a batch on the devices that work on it.
    evaluate: decodes held-out prompts with the state of a step and records the result.
    export: writes the draft directory of a step.
    rate: step -> learning rate, for the log.
    """

    step: TrainStep
    base_params: Params
    batches: grain.DatasetIterator
    place: Callable[[Batch], Batch]
    checkpoints: Checkpoints
    log: MetricsLog
    progress: Progress
    evaluate: Callable[[int, TrainState], None]
    export: Callable[[int, TrainState], None]
    rate: Callable[[int], float]
    stop: threading.Event
    steps: int
    log_every: int
    checkpoint_every: int
    eval_every: int

    def run(self, state: TrainState, done: int) -> tuple[TrainState, int]:
        """Train from `done` steps to the last, or until asked to stop; return state and step.

        Raises UserError where loss or gradient is not finite, naming the step.
        """
        if done and self._measured_at(done):
            self.evaluate(done, state)  # unless it was before the run was stopped
        watch = FiniteWatch(self.checkpoints)
        clock = Clock()
        while done < self.steps and not self.stop.is_set():
            with clock.waiting():
                batch = self.place(next(self.batches))
            state, metrics = self.step(state, self.base_params, batch)
            done += 1
            watch.take(done, metrics)
            clock.count(batch.tokens.size)
            self.progress.update()
            if self._due(self.log_every, done):
                self._log(done, watch.settle(), clock)
            if self._due(self.checkpoint_every, done):
                watch.settle()
                self.save(done, state)
            if self._measured_at(done):
                watch.settle()
                with clock.paused():
                    self.evaluate(done, state)
            if self.stop.is_set() and not self._due(self.checkpoint_every, done):
                watch.settle()
                self.save(done, state)
        return state, done

    def save(self, done: int, state: TrainState) -> None:
        """Write the draft and the checkpoint of this step.

        In this order: a run that goes on from a checkpoint finds the draft of its step.
        """
        self.checkpoints.require_space(state)
        self.export(done, state)
        self.checkpoints.save(done, state, self.batches)

    def _measured_at(self, done: int) -> bool:
        return self.eval_every > 0 and self._due(self.eval_every, done)

    def _due(self, every: int, done: int) -> bool:
        return done == self.steps or (every > 0 and done % every == 0)

    def _log(self, done: int, metrics: StepMetrics, clock: Clock) -> None:
        tokens_per_second, waited = clock.read()
        row = metrics_row(done, metrics) | {
            "learning_rate": self.rate(done - 1),
            "tokens_per_second": round(tokens_per_second, 1),
            "data_wait": round(waited, 4),
        }
        self.log.write("train", row)
        accuracies = " ".join(f"{value:.2f}" for value in row["accuracy"])
        self.progress.show(
            f"loss {row['loss']:.3f}, accuracy {accuracies}, {tokens_per_second:.0f} tokens/s"
        )


def metrics_row(step: int, metrics: StepMetrics) -> dict[str, Any]:
    """Return a step's own values: total loss, then lists by draft position."""
    host = jax.device_get(metrics)
    positions = {name: value.tolist() for name, value in vars(host.positions).items()}
    return {
        "step": step,
        "loss": float(host.loss),
        **positions,
        "gradient_norm": float(host.gradient_norm),
    }


class FiniteWatch:
    """Looks at every step's loss and gradient, one step late so that the device never waits."""

    def __init__(self, checkpoints: Checkpoints):
        """Take the checkpoints, to say which one is left."""
        self._checkpoints = checkpoints
        self._pending: tuple[int, StepMetrics] | None = None

    def take(self, step: int, metrics: StepMetrics) -> None:
        """Check the step before and remember this one."""
        if self._pending is not None:
            self.settle()
        self._pending = (step, metrics)

    def settle(self) -> StepMetrics:
        """Check the step taken last, waiting for it, and return its metrics."""
        step, metrics = self._pending
        for name, value in (("loss", metrics.loss), ("gradient", metrics.gradient_norm)):
            if not math.isfinite(float(value)):
                saved = self._checkpoints.latest_step()
                rest = "none was saved" if saved is None else f"that of step {saved} is"
                raise UserError(
                    f"the {name} is {float(value)} at step {step}; lower --learning_rate and "
                    f"start in another --workdir (last checkpoint before it: {rest})"
                )
        return metrics


class Clock:
    """Tokens per second since the last reading, and the share of time spent waiting for data."""

    def __init__(self):
        """Start."""
        self._restart()

    def count(self, tokens: int) -> None:
        """Add tokens that were trained on (padding included)."""
        self._tokens += tokens

    def waiting(self) -> _Span:
        """Return a context whose time counts as waiting for data."""
        return _Span(self, "_waited")

    def paused(self) -> _Span:
        """Return a context whose time does not count at all."""
        return _Span(self, "_paused")

    def read(self) -> tuple[float, float]:
        """Return (tokens per second, share of waiting) and start again."""
        elapsed = max(time.perf_counter() - self._started - self._paused, 1e-9)
        result = self._tokens / elapsed, self._waited / elapsed
        self._restart()
        return result

    def _restart(self) -> None:
        self._started, self._tokens = time.perf_counter(), 0
        self._waited = self._paused = 0.0


class _Span:
    def __init__(self, clock: Clock, name: str):
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        spent = time.perf_counter() - self._entered
        setattr(self._clock, self._name, getattr(self._clock, self._name) + spent)
