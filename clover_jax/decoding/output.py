"""Output of decoded rows: a file or stdout, a progress bar, or the text of one row as it comes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clover_jax.data.prompts import BadPrompt, Failures, Prompt, prompts_hash
from clover_jax.decoding.row_state import Turn
from clover_jax.decoding.row_stream import RowEvent, RowStream
from clover_jax.decoding.row_totals import RowTotals
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.jsonl import to_json
from clover_jax.runtime.progress import Progress
from clover_jax.runtime.row_writer import RowSink, RowWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESET, _PROMPT = "\033[0m", "\033[2m"
# The tokens of one forward pass of the base have one shade; the shades alternate.
_FORWARDS = ("\033[32m", "\033[96m")


class RowPrinter(RowSink):
    """Prints rows on stdout, in input order."""

    def _write(self, row: dict[str, Any]) -> None:
        # Flushed, so that a reader of the pipe gets each row at once.
        print(to_json(row), flush=True)


def open_rows(
    path: Path, prompts: Sequence[Prompt | BadPrompt], settings: dict[str, Any], overwrite: bool
) -> RowSink:
    """Return a RowWriter in the primary process, and in the others a sink that drops rows.

    All processes call it, and all resume after the rows that are in the file.

    settings: everything that the rows depend on, as JSON values.
    """
    # Filled in the primary process alone: the others never open the file.
    writers: list[RowWriter] = []

    def open_writer() -> int:
        hashed = prompts_hash(prompts)
        writer = RowWriter(path, settings=settings, prompts_hash=hashed, overwrite=overwrite)
        writers.append(writer)
        return writer.finished

    finished = from_primary(open_writer)
    return writers[0] if writers else RowSink(finished)


def decode_with_bar(
    stream: RowStream, sink: RowSink, totals: RowTotals, bar: Progress, compiling: CompileClock
) -> None:
    """Decode all rows into `sink`; each reason why rows fail gets a line above the bar."""
    started, before, failures = compiling.now(), totals.tokens, Failures()
    for event in stream:
        if event.row is None:
            continue
        # The row is kept first, then counted and shown.
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


class LiveText:
    """Writes the prompt and the answer of one row at a time, as events of watched rows arrive.

    Without a terminal, or with NO_COLOR set, the text has no colors. Without a tokenizer token ids
    are written.
    """

    def __init__(self, file: TextIO, tokenizer: PreTrainedTokenizerBase | None):
        self._file, self._tokenizer = file, tokenizer
        self._in_color = wants_color(file)
        self._turn_number = 0  # within its row
        self._is_begun = False

    def take(self, event: RowEvent) -> None:
        """Write the new text of an event."""
        # Failed and skipped rows, which have no progress, are reported elsewhere.
        progress = event.progress
        if progress is None or isinstance(event.prompt, BadPrompt):
            return
        if not self._is_begun:
            self._write(self._prompt_text(event.prompt, progress.turn), _PROMPT)
        for piece in progress.pieces:
            text = piece.text if self._tokenizer else "".join(f"{id_} " for id_ in piece.ids)
            self._write(text, _FORWARDS[piece.forward % len(_FORWARDS)])

        self._is_begun = not progress.ended
        if progress.ended:
            self._write("\n", "")
            self._turn_number = 0 if event.row else self._turn_number + 1
        self._file.flush()

    def _prompt_text(self, prompt: Prompt, turn: Turn) -> str:
        """Return the text of a prompt; for a conversation only the user's newest turn."""
        # The template's text around a question is noise to a reader.
        if prompt.turns is not None:
            return f"{prompt.turns[self._turn_number]}\n"
        if prompt.messages is not None:
            return f"{prompt.messages[-1]['content']}\n"
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(turn.prompt_ids))
        return " ".join(map(str, turn.prompt_ids)) + " "

    def _write(self, text: str, style: str) -> None:
        if text:
            self._file.write(f"{style}{text}{_RESET}" if style and self._in_color else text)


def wants_color(file: TextIO) -> bool:
    """Return whether `file` is a terminal with colors and the user has not turned them off."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not is_plain
