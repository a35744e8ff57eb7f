"""The logs of a run and its drafts: WORKDIR/draft, the last step, and WORKDIR/best, by tau."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from pathlib import Path
from typing import Any

from clover_jax.array_types import Params
from clover_jax.checkpoints.card import Card, read_card, write_native
from clover_jax.data.tokenizer import template_text
from clover_jax.decoding.tree_config import portable_name
from clover_jax.runtime.checkpoint import disk_errors
from clover_jax.runtime.distributed import is_primary, to_host, wait_for_all
from clover_jax.runtime.jsonl import append_row, keep_rows, read_rows
from clover_jax.runtime.progress import Progress
from clover_jax.runtime.provenance import git_revision, versions
from clover_jax.training.decoding_eval import DecodingEvaluator, Interrupted
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import TrainInputs
from clover_jax.training.step import TrainState

METRICS = "metrics.jsonl"
EVAL = "eval.jsonl"
TENSORBOARD = "tensorboard"

DRAFT, BEST = "draft", "best"


class MetricsLog:
    """Rows of numbers by step, in a workdir. A value may be a number or a list by position.

    Only the primary process writes; the others know the rows as well.
    """

    def __init__(self, workdir: Path, step: int):
        """Open the files; rows after `step`, from which the run resumes, are cut."""
        self._paths = {"train": workdir / METRICS, "eval": workdir / EVAL}
        self._board = None
        # One process writes; all read afterwards, since they decide alike what is the best head.
        if is_primary():
            for path in self._paths.values():
                keep_rows(path, lambda row: row["step"] <= step)
            self._board = TensorBoard(workdir / TENSORBOARD, step)
        wait_for_all("metrics")
        path = self._paths["eval"]
        self._evaluated = list(read_rows(path)) if path.exists() else []

    def write(self, kind: str, row: dict[str, Any]) -> None:
        """Append a row, which has a "step"; kind: "train" or "eval"."""
        # Every process decides by these rows, so each of them keeps them.
        if kind == "eval":
            self._evaluated.append(row)
        if self._board is None:
            return
        append_row(self._paths[kind], row)

        # TensorBoard knows single numbers only.
        scalars: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, list):
                scalars |= {f"{kind}/{name}/{i}": item for i, item in enumerate(value)}
            elif name != "step":
                scalars[f"{kind}/{name}"] = value
        self._board.write(row["step"], scalars)

    def evaluated_at(self, step: int) -> dict[str, Any] | None:
        return next((row for row in self._evaluated if row["step"] == step), None)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class TensorBoard:
    """An event file, written and flushed at once.

    (tensorboardX's own SummaryWriter writes from a thread, which reports a full disk by a
    traceback of its own, at the end of the process.)
    """

    def __init__(self, directory: Path, step: int):
        """Open a new file; TensorBoard drops the steps after `step` of older files."""
        # Imported here: it costs half a second, which `--help` should not pay.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # Files of earlier runs stay: TensorBoard joins them, less the steps after this one's start.
        directory.mkdir(exist_ok=True)
        self._event = Event
        self._writer = EventsWriter(str(directory / "events"))
        restart = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=step + 1, session_log=restart))

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """Add the finite numbers among `scalars` at a step."""
        from tensorboardX.summary import scalar

        for tag, value in scalars.items():
            # It draws neither texts nor what is not finite.
            if isinstance(value, int | float) and math.isfinite(value):
                event = self._event(wall_time=time.time(), step=step, summary=scalar(tag, value))
                self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        # Every row was flushed when it was written: an error here was raised there before.
        with contextlib.suppress(OSError):
            self._writer.close()


class DraftWriter:
    """Writes native draft directories, each replaced atomically."""

    def __init__(self, workdir: Path, settings: TrainSettings, inputs: TrainInputs):
        self._workdir, self._inputs = workdir, inputs
        # Read once: a checkout may change under a run that takes days.
        self._provenance = {
            "command": "train",
            "flags": settings.to_dict(),
            "data_hash": inputs.data.hash,
            "draft_vocab_coverage": inputs.draft_vocab_coverage,
            "git_revision": git_revision(),
            "versions": versions(),
        }

    def write(
        self, name: str, params: Params, step: int, measured: dict[str, Any] | None = None
    ) -> None:
        """Write WORKDIR/name.

        measured: the row of eval.jsonl of this very step, if any.
        Raises UserError where the disk refuses it; what was there before stays.
        """
        # Of this very step: a tau of another one would be wrong here.
        provenance = self._provenance | {
            "steps": step,
            "tau": measured["tau"] if measured else None,
            "measured": measured,
        }
        directory = self._workdir / name
        params = to_host(params)  # by all processes together
        if not is_primary():
            return

        def refusal(reason: str) -> str:
            return (
                f"cannot write {directory}: {reason}; free some space, the same command then "
                "resumes from the last checkpoint"
            )

        with disk_errors(refusal):
            card = Card(
                self._inputs.head.config,
                self._inputs.base_fingerprint,
                portable_name(self._inputs.tree),
                provenance,
                chat_template=template_text(self._inputs.tokenizer),
            )
            write_native(directory, card, params)


def best_measured(workdir: Path) -> dict[str, Any] | None:
    """Return the row of eval.jsonl that the head in WORKDIR/best was kept for; None without one."""
    # Read from the head's own card: a resumed run cuts rows of eval.jsonl and keeps the head.
    directory = workdir / BEST
    return read_card(directory).provenance.get("measured") if directory.exists() else None


@dataclasses.dataclass
class Measurement:
    """Decodes with the head of a step, records the result, keeps the best head.

    evaluator: without one nothing is ever measured.
    best: the row that the head in WORKDIR/best was measured with, if there is one. It may be of a
        later step than the rows of eval.jsonl, which end where the run resumes.
    """

    evaluator: DecodingEvaluator | None
    log: MetricsLog
    writer: DraftWriter
    progress: Progress
    stop: threading.Event
    best: dict[str, Any] | None

    def __call__(self, step: int, state: TrainState) -> None:
        """Measure a step, unless that was done before or the run is asked to stop."""
        if self.evaluator is None or self.log.evaluated_at(step):
            return
        try:
            row = {"step": step} | self.evaluator.measure(state.params, self.stop)
        except Interrupted:
            return  # the step is measured when the run resumes

        # Other prompts or another tree give other taus: the first with them is the best so far.
        best = self.best or {}
        if best.get("measured_with") != row["measured_with"] or row["tau"] > best["tau"]:
            self.writer.write(BEST, state.params, step, row)
            self.best = row
        # Written again: the draft that was saved at this step does not have its tau yet.
        self.writer.write(DRAFT, state.params, step, row)
        # Last, so that a row means that the drafts of its step are on disk.
        self.log.write("eval", row)

        rates = " ".join(f"{rate:.2f}" for rate in row["hit_rate"])
        self.progress.write(
            f"step {step}: tau {row['tau']:.2f}, hit rates {rates}, "
            f"{row['equal']} of {row['prompts']} outputs equal to plain decoding"
        )

    def export(self, step: int, state: TrainState) -> None:
        self.writer.write(DRAFT, state.params, step, self.log.evaluated_at(step))
