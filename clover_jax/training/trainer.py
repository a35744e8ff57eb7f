"""The training loop, with its logging, checkpoints and measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from clover_jax.drafters.drafter import with_draft_rows
from clover_jax.errors import UserError
from clover_jax.models.placement import place_rows
from clover_jax.runtime.checkpoint import Checkpoints
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import Progress
from clover_jax.training.outputs import Measurement, MetricsLog
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import TrainInputs
from clover_jax.training.step import (
    StepMetrics,
    TrainState,
    fit_scale,
    make_schedule,
    make_train_step,
)


@dataclasses.dataclass
class Trainer:
    """The loop, and everything that it uses."""

    settings: TrainSettings
    inputs: TrainInputs
    batches: grain.DatasetIterator
    checkpoints: Checkpoints
    log: MetricsLog
    progress: Progress
    compiling: CompileClock
    measurement: Measurement
    stop: threading.Event

    def run(self, state: TrainState, done: int) -> int:
        """Train from step `done` to the last, or until `stop` is set; return the steps done.

        Raises UserError where loss or gradient is not finite, naming the step.
        """
        config, steps = self.inputs.step, self.settings.steps
        mesh = config.mesh
        train_step = make_train_step(config)
        # lm_head's rows of a reduced vocabulary are gathered once for the run, not in each step.
        base_params = with_draft_rows(self.inputs.base.params, config.head.config)
        if done:
            # A killed run may have left the draft of a later step than its checkpoint's.
            self.measurement.export(done, state)
            if self._measured_at(done):
                self.measurement(done, state)  # unless it was before the run was stopped

        watch, clock = FiniteWatch(self.checkpoints, done), Clock(self.compiling)
        shown = done
        # Read once a step: a stop between two reads would end an unsaved run.
        is_stopping = self.stop.is_set()
        while done < steps and not is_stopping:
            # The step is dispatched and not waited for: the next batch is made meanwhile.
            with clock.waiting():
                batch = next(self.batches)
                batch = place_rows(batch, mesh) if isinstance(mesh, Mesh) else batch
            if not done:
                state = fit_scale(config, state, base_params, batch)
            state, metrics = train_step(state, base_params, batch)
            done += 1
            watch.take(done, metrics)
            clock.count(batch.tokens.size)

            # Nothing is logged, saved or measured of a step that is not known to be finite.
            if self._due(self.settings.log_every, done):
                self._log(done, watch.settle(), clock)
            # Saved before it is measured: a run that is stopped meanwhile measures when it resumes.
            # The clock stands still, so that tokens a second are those of training alone.
            is_saved = self._due(self.settings.checkpoint_every, done)
            if is_saved:
                watch.settle()
                with clock.paused():
                    self.save(done, state)
            if self._measured_at(done):
                watch.settle()
                with clock.paused():
                    self.measurement(done, state)
            is_stopping = self.stop.is_set()
            if is_stopping and not is_saved:
                watch.settle()
                self.save(done, state)
            # The step just dispatched may still run: progress counts finished steps only.
            self.progress.update(watch.finished - shown)
            shown = watch.finished
        return done

    def save(self, done: int, state: TrainState) -> None:
        """Write the draft and the checkpoint of this step.

        In this order, so that a run that resumes from a checkpoint finds the draft of its step.
        """
        self.measurement.export(done, state)
        self.checkpoints.save(done, state, self.batches)

    def _measured_at(self, done: int) -> bool:
        # --eval_every=0 means never, not even at the last step (checkpoints always have that one).
        every = self.settings.eval_every
        return every > 0 and self._due(every, done)

    def _due(self, every: int, done: int) -> bool:
        return done == self.settings.steps or (every > 0 and done % every == 0)

    def _log(self, done: int, metrics: StepMetrics, clock: Clock) -> None:
        """Write a step's own values: total loss, lists by draft position, rate and speed."""
        tokens_per_second, waited = clock.read()
        host = jax.device_get(metrics)
        of_positions = {**host.positions.terms._asdict(), "accuracy": host.positions.accuracy}
        of_positions["pairs"] = host.positions.pairs
        row: dict[str, Any] = {
            "step": done,
            "loss": float(host.loss),
            **{name: value.tolist() for name, value in of_positions.items()},
            "gradient_norm": float(host.gradient_norm),
            # optax counts from 0: this is the rate that step `done` was made with.
            "learning_rate": make_schedule(self.inputs.step.optimizer)(done - 1),
            "tokens_per_second": round(tokens_per_second, 1),
            "data_wait": round(waited, 4),
        }
        self.log.write("train", row)
        accuracies = " ".join(f"{value:.2f}" for value in row["accuracy"])
        self.progress.show(
            f"loss {row['loss']:.3f}, accuracy {accuracies}, {tokens_per_second:.0f} tokens/s"
        )


class FiniteWatch:
    """Looks at every step's loss and gradient, one step late so that the device never waits.

    finished: the last step whose values are known.
    """

    def __init__(self, checkpoints: Checkpoints, finished: int = 0):
        """Take the checkpoints, to say which one is left."""
        self._checkpoints, self.finished = checkpoints, finished
        self._pending: tuple[int, StepMetrics] | None = None

    def take(self, step: int, metrics: StepMetrics) -> None:
        """Check the step before and remember this one."""
        if self._pending is not None:
            self.settle()
        self._pending = (step, metrics)

    def settle(self) -> StepMetrics:
        """Check the step taken last, waiting for it, and return its metrics."""
        # Reading a value waits for the device, so every caller has a reason to wait anyway.
        assert self._pending is not None  # a step was taken
        step, metrics = self._pending
        for name, value in (("loss", metrics.loss), ("gradient", metrics.gradient_norm)):
            if not math.isfinite(float(value)):
                saved = self._checkpoints.latest_step()
                rest = "none was saved" if saved is None else f"that of step {saved} is"
                raise UserError(
                    f"the {name} is {float(value)} at step {step}; lower --learning_rate and "
                    f"start in another --workdir (last checkpoint before it: {rest})"
                )
        self.finished = step
        return metrics


class Clock:
    """Tokens per second since the last reading, and the share of time spent waiting for data."""

    def __init__(self, compiling: CompileClock):
        """Start; the clock stands still while programs are compiled."""
        self._now = compiling.now
        self._restart()

    def count(self, tokens: int) -> None:
        """Add tokens that were trained on (padding included)."""
        self._tokens += tokens

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as waiting for data."""
        entered = self._now()
        yield
        self._waited += self._now() - entered

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time within out altogether."""
        entered = self._now()
        yield
        self._paused += self._now() - entered

    def read(self) -> tuple[float, float]:
        """Return (tokens per second, share of waiting) and start again."""
        elapsed = max(self._now() - self._started - self._paused, 1e-9)
        result = self._tokens / elapsed, self._waited / elapsed
        self._restart()
        return result

    def _restart(self) -> None:
        self._started, self._tokens = self._now(), 0
        self._waited = self._paused = 0.0
