"""The metrics of a run: metrics.jsonl, eval.jsonl, and the same for TensorBoard."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.runtime.distributed import is_primary, wait_for_all
from clover_jax.runtime.jsonl import append_row, keep_rows, read_rows

METRICS = "metrics.jsonl"
EVAL = "eval.jsonl"
TENSORBOARD = "tensorboard"


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
        """Return the row of eval.jsonl of a step, if it was measured."""
        return next((row for row in self._evaluated if row["step"] == step), None)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of eval.jsonl since what they are measured with last changed.

    Rows of versions that did not record it are comparable with each other.
    """
    if not rows:
        return []
    # From the newest row backwards, as far as nothing changed.
    wanted = rows[-1].get("measured_with")
    newest = itertools.takewhile(lambda row: row.get("measured_with") == wanted, reversed(rows))
    return list(newest)[::-1]


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
