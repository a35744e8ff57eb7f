"""One run of `train`: load, check and assemble everything, then the loop, its log and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from clover_jax.array_types import Array
from clover_jax.checkpoints import mtp
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.card import CARD, read_card
from clover_jax.checkpoints.stored_head import open_head
from clover_jax.config import LossSpec
from clover_jax.data.chat_templates import frozen_clock
from clover_jax.data.pipeline import make_pipeline
from clover_jax.data.prepared import TRAIN, is_prepared
from clover_jax.drafters.drafter import with_draft_rows
from clover_jax.errors import UserError
from clover_jax.field_types import declared_settings
from clover_jax.models.param_layouts import leaf_path
from clover_jax.models.placement import param_shardings, place_rows, rows_of_process, with_shardings
from clover_jax.runtime.checkpoint import Checkpoints
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.device_memory import advise_on_memory
from clover_jax.runtime.distributed import agreed, is_primary, wait_for_all
from clover_jax.runtime.files import check_renames, only_process_in, read_json_object, write_json
from clover_jax.runtime.progress import Progress, progress_bar, say
from clover_jax.training.outputs import (
    BEST,
    DRAFT,
    EVAL,
    METRICS,
    TENSORBOARD,
    DraftWriter,
    Measurement,
    MetricsLog,
    best_measured,
)
from clover_jax.training.settings import (
    SETTINGS,
    TrainSettings,
    check_resumable,
    record_settings,
    recorded_settings,
)
from clover_jax.training.setup import TrainInputs, load_inputs, optimizer_config
from clover_jax.training.step import (
    StepMetrics,
    TrainState,
    TrainStepConfig,
    fit_start,
    init_state,
    make_schedule,
    make_train_step,
)

CHECKPOINTS, RESULT = "checkpoints", "result.json"


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
                self.measurement(done, state)  # skipped if the log has this step's figures

        watch, clock = FiniteWatch(self.checkpoints, done), Clock(self.compiling)
        shown = done
        # Read once a step: a stop between two reads would end an unsaved run.
        is_stopping = self.stop.is_set()
        while done < steps and not is_stopping:
            with clock.waiting():
                batch = next(self.batches)
                batch = place_rows(batch, mesh) if isinstance(mesh, Mesh) else batch
            if not done:
                with clock.paused():
                    state = fit_start(config, state, base_params, batch)
            # The step is dispatched and not waited for: the next batch is made meanwhile.
            state, metrics = train_step(state, base_params, batch)
            done += 1
            watch.take(done, metrics)
            clock.count(batch.tokens.size)

            # Nothing is logged, saved or measured of a step that is not known to be finite.
            if self._due(self.settings.log_every, done):
                self._log(done, watch.settle(), clock)
            # Saved before it is measured: a run that is stopped meanwhile measures when it resumes.
            # The clock stands still, so that tokens a second count training alone.
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
        elapsed = max(self._now() - self._started - self._paused, 1e-9)
        result = self._tokens / elapsed, self._waited / elapsed
        self._restart()
        return result

    def _restart(self) -> None:
        self._started, self._tokens = self._now(), 0
        self._waited = self._paused = 0.0


def run_training(
    settings: TrainSettings, workdir: Path, stop: threading.Event, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Train a head in `workdir`, or resume an earlier run there; return the report.

    stop: when set (by SIGTERM, Ctrl-C), the run saves a checkpoint after its current step and
        returns.
    mesh: the devices to train on, None for one; a run may resume on another mesh.
    Raises UserError for settings that cannot work, before anything is trained.
    """
    # A run that replaced another is resumed like any other.
    overwrite, settings = settings.overwrite, dataclasses.replace(settings, overwrite=False)
    # Two runs would write their rows and checkpoints into each other's.
    alone = only_process_in(workdir, "is training", "--workdir")
    # A caller's jax_enable_x64 would give indices and numbers 64 bits, next to arrays of 32.
    with alone if is_primary() else contextlib.nullcontext(), jax.enable_x64(False):
        if is_primary():
            check_renames(workdir)
        # The same command again costs a finished run no loading.
        finished = None if overwrite else _finished_report(workdir, settings)
        if finished is not None:
            # Fewer steps change nothing of it: its rates are from a schedule that ended there.
            settings = dataclasses.replace(settings, steps=finished["steps"])
            recorded = recorded_settings(workdir)
            settings = _measured_as(recorded, settings)
            if recorded == settings:
                return finished

        # Templates read the time at which the run began, or its data were prepared.
        begun = [] if overwrite else [workdir / SETTINGS]
        if is_prepared(settings.data):
            begun.append(Path(settings.data).expanduser() / TRAIN)
        with (
            frozen_clock(*begun),
            advise_on_memory(
                f"train on {settings.batch_size} rows of {settings.seq_len} tokens",
                "give --gradient_accumulation_steps, --remat, a smaller --batch_size or --seq_len, "
                "or more devices by --mesh; --dry_run says what a run takes",
            ),
        ):
            inputs = load_inputs(settings, mesh)
            if overwrite:
                # Only now, so that a mistake in the flags deletes nothing.
                if is_primary():
                    _delete_run(workdir)
                wait_for_all("overwrite")
            # What the run depends on is known only now: the hashes of what was loaded.
            if is_primary():
                check_resumable(workdir, settings, inputs.identity, _has_steps(workdir))
                _check_loss(workdir / DRAFT, inputs.head.config.loss)
            if finished is None:
                return _train(settings, inputs, workdir, agreed(stop))
            # All its steps are done; what differs may change, such as where the data lie.
            if is_primary():
                record_settings(workdir, settings, inputs.identity)
            return finished


def _measured_as(finished: TrainSettings | None, settings: TrainSettings) -> TrainSettings:
    """Return the settings with the measuring flags of a finished run, naming those that differ."""
    measuring = {
        name: getattr(finished, name)
        for name, declared in declared_settings(TrainSettings).items()
        if finished is not None and declared.group == "measuring"
    }
    changed = [name for name, value in measuring.items() if value != getattr(settings, name)]
    if changed:
        flags = ", ".join(f"--{name}" for name in changed)
        say(f"the run is finished, so {flags} has no effect; `evaluate` measures its head")
    return dataclasses.replace(settings, **measuring)


def _has_steps(workdir: Path) -> bool:
    """Return whether a run has trained in the workdir; one that was refused leaves empty files."""
    metrics = workdir / METRICS
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    return has_rows or (workdir / DRAFT).exists() or any((workdir / CHECKPOINTS).glob("[0-9]*"))


def _check_loss(draft: Path, loss: LossSpec) -> None:
    """Raise UserError where the run's head learned with another loss; a method's own may change."""
    if not (draft / CARD).is_file():
        return
    before = vars(read_card(draft).config.loss)
    differs = {name: value for name, value in before.items() if value != getattr(loss, name)}
    if before["dpace"] and loss.dpace:
        differs.pop("decay", None)  # D-PACE's weights stand in its place
    if differs:
        asked = ",".join(f"{name}={value}" for name, value in differs.items())
        raise UserError(
            f"{draft} learned with another loss: pass --loss={asked}, or another --workdir"
        )


def _delete_run(workdir: Path) -> None:
    """Delete the files of an earlier run, and nothing else that is in the workdir."""
    # Without recorded settings nothing ran here; --workdir may be mistyped.
    if not (workdir / SETTINGS).exists():
        return
    # The settings last, so that an interrupted deletion can be repeated.
    for name in (RESULT, METRICS, EVAL, TENSORBOARD, CHECKPOINTS, DRAFT, BEST, SETTINGS):
        path = workdir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _train(
    settings: TrainSettings, inputs: TrainInputs, workdir: Path, stop: threading.Event
) -> dict[str, Any]:
    """Restore or begin, run the loop, report; everything opened is closed again."""
    before = recorded_settings(workdir)  # of the run that was stopped, if any
    # Of activations a process reads its own rows only; None is all of them.
    mesh = inputs.step.mesh
    rows = rows_of_process(inputs.pipeline.batch_size, mesh) if isinstance(mesh, Mesh) else None
    dataset = make_pipeline(inputs.data.samples, inputs.pipeline, rows)

    with contextlib.ExitStack() as stack:
        # The position in the data is part of a checkpoint, so both are opened together.
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(workdir / CHECKPOINTS)))
        batches = stack.enter_context(contextlib.closing(iter(dataset)))
        state, done = restore_or_init(inputs.step, inputs.base, settings.seed, checkpoints, batches)
        if done > settings.steps:
            raise UserError(
                f"{workdir} has done {done} steps, more than --steps={settings.steps}; pass at "
                "least as many, or another --workdir"
            )
        if is_primary():
            # Only now is it certain that the run continues with these settings.
            record_settings(workdir, settings, inputs.identity)
            # It is the result of a run that had finished; this one has more to do.
            (workdir / RESULT).unlink(missing_ok=True)

        log = stack.enter_context(contextlib.closing(MetricsLog(workdir, done)))
        # One bar, however many processes there are.
        shown = sys.stderr if is_primary() else io.StringIO()
        compiling = stack.enter_context(CompileClock())
        progress = stack.enter_context(
            progress_bar(settings.steps, "train", initial=done, file=shown, first_compiles=True)
        )
        if done:
            progress.write(f"resuming {workdir} from step {done}")
        if done and before is not None and before.steps != settings.steps:
            then, now = (make_schedule(optimizer_config(one)) for one in (before, settings))
            progress.write(
                f"--steps={settings.steps} instead of {before.steps} changes the schedule: the "
                f"learning rate was {float(then(done - 1)):.3g} at step {done} and is "
                f"{float(now(done)):.3g} at step {done + 1}; it falls to 0 after step "
                f"{settings.steps}"
            )

        writer, best = DraftWriter(workdir, settings, inputs), best_measured(workdir)
        measurement = Measurement(inputs.evaluator, log, writer, progress, stop, best)
        trainer = Trainer(
            settings, inputs, batches, checkpoints, log, progress, compiling, measurement, stop
        )
        done = trainer.run(state, done)

        checkpoints.wait()  # a run has finished once its last checkpoint is on disk
        return _report(workdir, settings, done, measurement)


def restore_or_init(
    config: TrainStepConfig, base: BaseModel, seed: int, checkpoints: Checkpoints, batches: Any
) -> tuple[TrainState, int]:
    """Return the newest checkpoint's state and step, or a fresh state and 0."""
    # Shapes are enough to restore: no state is computed that a checkpoint replaces.
    shapes = jax.eval_shape(lambda params: init_state(config, params, seed), base.params)
    if config.mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(lambda _: device, shapes)
    else:
        placed = param_shardings(shapes, config.mesh)

    restored = checkpoints.restore(with_shardings(shapes, placed), batches)
    if restored is not None:
        return restored
    # Without out_shardings the optimizer's state would lie on one device.
    init = jax.jit(init_state, static_argnums=(0, 2), out_shardings=placed)
    return _with_stored_mtp(config, base, init(config, base.params, seed)), 0


def _with_stored_mtp(config: TrainStepConfig, base: BaseModel, state: TrainState) -> TrainState:
    """Return the fresh state of an MTP head with the params that are stored with the base."""
    if config.head.config.kind != mtp.NAME:
        return state
    if not mtp.brings_one(base):
        say(f"{base.source} has no drafting layer of its own: the head begins as the base")
        return state
    say(f"the head begins as the drafting layer of {base.source}")
    stored = open_head(mtp.NAME, base)
    if stored.config.layer != config.head.config.layer:
        raise UserError(
            "the drafting layer of this base has its rotation; leave out --draft_rope_theta"
        )

    # Leaf by leaf, each where the fresh one lies.
    def read(path: tuple, leaf: Array) -> Array:
        values = stored.read(leaf_path(path)).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

    return state.replace(params=jax.tree.map_with_path(read, state.params))


def _finished_report(workdir: Path, settings: TrainSettings) -> dict[str, Any] | None:
    # A finished run of more steps than `settings.steps` has done these too.
    path = workdir / RESULT
    report = read_json_object(path) if path.exists() else None
    if report is None or report["steps"] < settings.steps:
        return None
    # The folder may have another name since.
    places = {"workdir": workdir, "draft": workdir / DRAFT, "best": workdir / BEST}
    here = {name: str(place) for name, place in places.items() if name in report}
    return report | here | {"already_finished": True}


def _report(
    workdir: Path, settings: TrainSettings, done: int, measurement: Measurement
) -> dict[str, Any]:
    """Return the run's report; the report of a finished run is also written to the workdir."""
    best = measurement.best
    # The measurement of the last step may have been interrupted: the next run makes it.
    is_measured = measurement.evaluator is None or measurement.log.evaluated_at(done) is not None
    finished = done == settings.steps and is_measured
    report: dict[str, Any] = {
        "workdir": str(workdir),
        "finished": finished,
        "steps": done,
        "draft": str(workdir / DRAFT),
    }
    if best is not None:
        report |= {"best": str(workdir / BEST), "best_step": best["step"], "tau": best["tau"]}
        report |= {name: best[name] for name in ("hit_rate", "equal", "prompts")}
        # Heads of earlier versions did not record it.
        report["tree"] = best.get("measured_with", {}).get("tree")

    if finished and is_primary():
        write_json(workdir / RESULT, report)
    return report
