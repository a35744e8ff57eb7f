"""What a run writes down: metrics.jsonl, eval.jsonl, and the same for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from clover_jax.jsonl import append_row, keep_rows, read_rows

METRICS = "metrics.jsonl"
EVAL = "eval.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Rows of numbers by step, in a workdir. A value may be a number or a list by position."""

    def __init__(self, workdir: Path, step: int):
        """Open the files; rows after `step`, from which the run goes on, are cut."""
        # Importing it costs half a second, which a finished workdir should not pay.
        from tensorboardX import SummaryWriter

        self._paths = {"train": workdir / METRICS, "eval": workdir / EVAL}
        for path in self._paths.values():
            keep_rows(path, lambda row: row["step"] <= step)
        self._board = SummaryWriter(str(workdir / TENSORBOARD), purge_step=step + 1)

    def write(self, kind: str, row: dict[str, Any]) -> None:
        """Append a row, which has a "step"; kind: "train" or "eval"."""
        append_row(self._paths[kind], row)
        for name, value in row.items():
            if isinstance(value, list):
                for position, item in enumerate(value):
                    self._scalar(f"{kind}/{name}/{position}", item, row["step"])
            elif name != "step":
                self._scalar(f"{kind}/{name}", value, row["step"])
        self._board.flush()

    def evaluated(self) -> list[dict[str, Any]]:
        """Return the rows of eval.jsonl."""
        return list(read_rows(self._paths["eval"])) if self._paths["eval"].exists() else []

    def close(self) -> None:
        """Close the TensorBoard file."""
        self._board.close()

    def _scalar(self, tag: str, value: Any, step: int) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            self._board.add_scalar(tag, value, step)
