"""One run of `generate`: prompts, models, engine, where its rows go, figures."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clover_jax.checkpoints.quantization import quantization_notice
from clover_jax.checkpoints.shapes import shape_notice
from clover_jax.data.chat_templates import frozen_clock, template_notice
from clover_jax.data.forms import content_text
from clover_jax.data.prompts import (
    BadPrompt,
    Failures,
    Prompt,
    prompts_hash,
    read_prompt_files,
    read_prompts,
    shipped_prompts,
    text_prompt,
)
from clover_jax.decoding.engine import Learner
from clover_jax.decoding.models import Models, identity_of, load, tree_notice
from clover_jax.decoding.race import check_one_process, with_attention, with_fastest_tree
from clover_jax.decoding.row_settings import GenerateOptions, GenerationSettings, sampling_for
from clover_jax.decoding.row_state import Turn
from clover_jax.decoding.row_stream import RowEvent, RowStream, RowTotals, open_stream, source_size
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.device_memory import advise_on_memory
from clover_jax.runtime.distributed import from_primary, is_primary
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.jsonl import to_json
from clover_jax.runtime.progress import Progress, passing_note, progress_bar, say
from clover_jax.runtime.row_writer import RowSink, RowWriter, manifest_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of --adapt: from models and its folder, or None, to what learns meanwhile.
Adapting = Callable[[Models, str | None], AbstractContextManager[Learner | None]]

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
    # Made in the primary process alone: the others never open the file.
    make = functools.cache(
        lambda: RowWriter(
            path, settings=settings, prompts_hash=prompts_hash(prompts), overwrite=overwrite
        )
    )
    finished = from_primary(lambda: make().finished)
    return make() if is_primary() else RowSink(finished)


def decode_with_bar(
    stream: RowStream, sink: RowSink, totals: RowTotals, bar: Progress, compiling: CompileClock
) -> None:
    """Decode all rows into `sink`; each reason why rows fail gets a line above the bar."""
    started, before, failures = compiling.now(), totals.tokens, Failures()
    for row in (event.row for event in stream if event.row is not None):
        # The row is kept first, then counted and shown.
        sink.append(row)
        seconds = compiling.now() - started
        sink.note_seconds(seconds)
        totals.add_row(row)

        if (line := failures.add(row)) is not None:
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

    Without a terminal, or with NO_COLOR set, it has no colors; without a tokenizer, token ids.
    """

    def __init__(self, file: TextIO, tokenizer: PreTrainedTokenizerBase | None):
        self._file, self._tokenizer = file, tokenizer
        self._in_color = wants_color(file)
        self._turn_number = 0  # within its row
        self._is_begun = False

    def take(self, event: RowEvent) -> None:
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
            said = prompt.turns[self._turn_number]
            return f"{said if isinstance(said, str) else content_text(said[-1])}\n"
        if prompt.messages is not None:
            return f"{content_text(prompt.messages[-1])}\n"
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


def run(
    options: GenerateOptions, settings: GenerationSettings, adapting: Adapting
) -> dict[str, Any]:
    """Decode the prompts and return the figures to report.

    Raises UserError for a mistake; rows of a file that fail are counted instead, unless `strict`.
    """
    begun = () if options.path is None or options.overwrite else (manifest_path(options.path),)
    with frozen_clock(*begun):
        return _run(options, settings, adapting)


def _run(
    options: GenerateOptions, settings: GenerationSettings, adapting: Adapting
) -> dict[str, Any]:
    if options.searches_tree:
        check_one_process()

    # Before the models, which take longer.
    prompts: Sequence[Prompt | BadPrompt] | None = None
    if options.prompt is not None:
        prompts = [text_prompt(options.prompt)]
    elif (files := options.prompts) is not None:
        # Strict: the first bad row ends the command; otherwise it fails when its turn comes.
        prompts = from_primary(lambda: read_prompt_files(files, options.strict))

    spec = options.spec
    with exact_matmuls(str(resolve_dtype(spec.dtype))):
        with passing_note(f"loading {spec.base}"):
            # The search for a tree starts on the loaded models, with the draft's own tree.
            models = load(dataclasses.replace(spec, tree=None) if options.searches_tree else spec)
        if prompts is None:
            # The prompts of a base are in its folder, which is known only after loading.
            shipped = shipped_prompts(models.base.directory, "--prompt=TEXT or --prompts=FILE")
            prompts = from_primary(lambda: read_prompts(shipped)[:1])
        # Measured with as many slots as the rows will have.
        slots = min(options.batch_size, len(prompts))
        models = with_attention(models, spec.attention, slots)
        if options.searches_tree:
            models = with_fastest_tree(models, prompts, slots, settings, resumed=options.begun)
        say(tree_notice(spec, models))
        say(template_notice(prompts, models.tokenizer))
        say(shape_notice(spec.base))
        say(quantization_notice(spec.int8))
        # A tree may not fit its head or the sampling rules: checked before anything is written.
        models.engine(1, sampling_for(settings, prompts), source_size=source_size(models, prompts))

        given = [row for row in prompts if isinstance(row, Prompt) and row.prediction is not None]
        if given and not models.copies:
            how = "--copy=16" if models.draft else "--draft=lookup"
            say(f"{len(given)} rows have a prediction, which nothing copies from: give {how}")
        if options.path is not None:
            # Not the batch size: it changes no row, and a run may resume with a smaller one.
            depends_on = {"base": spec.base, "draft": spec.draft, "run_seed": options.seed}
            depends_on |= settings.to_dict() | identity_of(models)
            opened = open_rows(options.path, prompts, depends_on, options.overwrite)
        else:
            opened = RowSink() if options.is_live else RowPrinter()
        with opened as sink, adapting(models, options.adapt) as learner:
            figures = _decode(options, settings, models, prompts, sink, learner)
        return from_primary(lambda: figures)  # the others have not read the rows of earlier runs


def _decode(
    options: GenerateOptions,
    settings: GenerationSettings,
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
    sink: RowSink,
    learner: Learner | None,
) -> dict[str, Any]:
    totals = RowTotals(sink.kept())
    tokens_before = totals.tokens
    if sink.finished:
        say(f"{sink.finished} rows are in {options.path} already")

    stream = open_stream(
        models,
        prompts,
        settings,
        batch_size=1 if options.is_live else options.batch_size,
        seed=options.seed,
        # On a terminal each step is shown; otherwise the host should not slow the device down.
        steps_per_chunk=from_primary(lambda: 1 if options.is_live and sys.stdout.isatty() else 8),
        part=slice(sink.finished, None),
        strict=options.strict or options.is_live,
        is_watched=options.is_live,
        learner=learner,
    )
    with CompileClock() as compiling, memory_advice(stream.batch_size):
        with passing_note("compiling"):
            stream.warm_up()
        started = compiling.now()
        if options.is_live:
            screen = LiveText(sys.stdout, models.tokenizer)
            for event in stream:
                screen.take(event)
                if event.row is not None:
                    sink.append(event.row)
                    totals.add_row(event.row)
                    say(event.row.get("skipped"))  # a failure raises, since the stream is strict
        else:
            # Rows on the terminal leave no place for a bar.
            file = io.StringIO() if options.output is None and sys.stdout.isatty() else None
            done = sink.finished
            with progress_bar(len(prompts), "generate", "row", initial=done, file=file) as bar:
                decode_with_bar(stream, sink, totals, bar, compiling)
        seconds = compiling.now() - started
        sink.note_seconds(seconds)  # with the time after the last row

    new_tokens = totals.tokens - tokens_before
    speed = round(new_tokens / seconds, 2) if new_tokens else None
    say(totals.summary(speed))
    return totals.to_dict() | {
        "seconds": round(sink.earlier_seconds + seconds, 3),
        "compile_seconds": round(compiling.seconds, 3),
        "tokens_per_second": speed,
        # Of this run alone, if it resumed an earlier one.
        "new_tokens": new_tokens,
        "new_seconds": round(seconds, 3),
    }


def memory_advice(batch_size: int) -> AbstractContextManager[None]:
    """Return a context that turns a device's lack of memory into advice."""
    advice = "give a smaller --batch_size or --max_new_tokens, or --dtype=bfloat16"
    return advise_on_memory(f"decode {batch_size} rows at once", advice)
