"""Where decoded rows go, and the two ways to watch them: a bar over many, or the text of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from clover_jax.data.prompts import BadPrompt, Failures, Prompt, prompts_hash
from clover_jax.generation.live_text import LiveText
from clover_jax.generation.row_stream import RowStream
from clover_jax.generation.row_totals import RowTotals
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.progress import Progress, say
from clover_jax.storage.jsonl import to_json
from clover_jax.storage.row_shards import Shard
from clover_jax.storage.row_writer import RowWriter


class RowPrinter(AbstractContextManager):
    """Prints rows on stdout, in input order; or nothing where only the figures are printed."""

    def __init__(self, quiet: bool = False, finished: int = 0):
        """Start with row 0, or resume after the rows that another process has."""
        self.finished, self.earlier_seconds = finished, 0.0
        self._quiet = quiet
        # Index -> row that waits until all rows before it are there.
        self._waiting: dict[int, dict[str, Any]] = {}

    def kept(self) -> Iterable[dict[str, Any]]:
        """Return none: printed rows are not kept."""
        return ()

    def append(self, row: dict[str, Any]) -> None:
        """Print `row` once all before it are printed."""
        if self._quiet:
            return
        self._waiting[row["index"]] = row
        while self.finished in self._waiting:
            # Flushed, so that a reader of the pipe has each row at once.
            print(to_json(self._waiting.pop(self.finished)), flush=True)
            self.finished += 1

    def note_seconds(self, seconds: float) -> None:
        """Do nothing: printed rows cannot be resumed."""

    def __exit__(self, *exception: object) -> None:
        return None


# Takes output rows in any order and keeps them in input order.
RowSink = RowWriter | RowPrinter


def open_rows(
    path: Path,
    prompts: Sequence[Prompt | BadPrompt],
    settings: dict[str, Any],
    overwrite: bool,
    part: Shard | None = None,
) -> RowSink:
    """Return a RowWriter in the primary process, and in the others a sink that drops rows.

    All processes call it, and all resume after the rows that are there.

    prompts: all of them, also where `path` has the rows of a part only; None is the whole.
    settings: what the rows depend on, as JSON values.
    """
    part = part or Shard()
    # Filled in the primary alone: the others never see the file.
    writers: list[RowWriter] = []

    def open_writer() -> int:
        # Rows of a part keep the numbers that they have in the whole.
        writer = RowWriter(
            path,
            settings=settings,
            prompts_hash=prompts_hash(prompts),
            overwrite=overwrite,
            first=part.rows(len(prompts)).start,
            shard=part.entry(len(prompts)),
        )
        writers.append(writer)
        return writer.finished

    finished = from_primary(open_writer)
    return writers[0] if writers else RowPrinter(quiet=True, finished=finished)


def decode_with_bar(
    stream: RowStream, sink: RowSink, totals: RowTotals, bar: Progress, compiling: CompileClock
) -> None:
    """Decode all rows into `sink`; each reason why rows fail gets a line above the bar."""
    started, before, failures = compiling.now(), totals.tokens, Failures()
    for event in stream:
        if event.row is None:
            continue
        # Rows first: what is shown may be wrong for a moment, what is kept may not.
        sink.append(event.row)
        seconds = compiling.now() - started
        sink.note_seconds(seconds)
        totals.add(event.row)

        if (line := failures.add(event.row)) is not None:
            bar.write(line)
        # The speed of this run alone: rows of earlier runs count for tau, but took no time here.
        speed = (totals.tokens - before) / seconds
        tau = "" if totals.tau is None else f"tau {totals.tau:.2f}, "
        bar.show(f"{tau}{speed:.0f} tokens/s")
        bar.update()
    for line in failures.counts():
        bar.write(line)


def decode_live(stream: RowStream, sink: RowSink, totals: RowTotals, screen: LiveText) -> None:
    """Decode, with the text on the screen as it comes."""
    for event in stream:
        screen.take(event)
        if event.row is not None:
            sink.append(event.row)
            totals.add(event.row)
            # A failure raises, since a live stream is strict; a row left out must be told here.
            if "skipped" in event.row:
                say(event.row["skipped"])
