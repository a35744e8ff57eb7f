"""The drafts of a run: WORKDIR/draft, the last step, and WORKDIR/best, by tau."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

from clover_jax.array_types import Params
from clover_jax.checkpoints.card import Card, read_card, write_native
from clover_jax.data.tokenizer import template_text
from clover_jax.decoding.tree_config import portable_name
from clover_jax.runtime.checkpoint import disk_errors
from clover_jax.runtime.distributed import is_primary, to_host
from clover_jax.runtime.progress import Progress
from clover_jax.runtime.provenance import git_revision, versions
from clover_jax.training.decoding_eval import DecodingEvaluator, Interrupted
from clover_jax.training.metrics import MetricsLog
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import TrainInputs
from clover_jax.training.step import TrainState

DRAFT, BEST = "draft", "best"


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
            row = self.evaluator.measure(state.params, self.stop).to_row(step)
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
        """Write the draft of a step, with what was measured at this very step, if anything."""
        self.writer.write(DRAFT, state.params, step, self.log.evaluated_at(step))
