"""One run of `generate`: prompts, models, engine, rows, figures."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from clover_jax.data.chat_templates import template_notice
from clover_jax.data.prompts import (
    BadPrompt,
    Prompt,
    read_prompt_files,
    read_prompts,
    shipped_prompts,
    text_prompt,
)
from clover_jax.generation.live_text import LiveText
from clover_jax.generation.options import GenerateOptions
from clover_jax.generation.output import (
    RowPrinter,
    RowSink,
    decode_live,
    decode_with_bar,
    open_rows,
)
from clover_jax.generation.row_stream import open_stream, source_size
from clover_jax.generation.row_totals import RowTotals
from clover_jax.generation.settings import GenerationSettings, sampling_for
from clover_jax.loading.identity import identity_of
from clover_jax.loading.models import Models, load
from clover_jax.pretrained.shapes import shape_notice
from clover_jax.quantization import quantization_notice
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.device_memory import advise_on_memory
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.progress import Progress, passing_note, progress_bar, say
from clover_jax.storage.jsonl import read_rows
from clover_jax.storage.row_shards import join_rows
from clover_jax.tree_search.race import check_one_process, with_attention, with_fastest_tree


def run(options: GenerateOptions, settings: GenerationSettings) -> dict[str, Any]:
    """Decode the prompts and return the figures to report.

    Raises UserError for what cannot be done; with a file of prompts and without `strict`, rows
    that fail are counted instead.
    """
    if options.join:
        # Only files are joined, which the primary has.
        return from_primary(lambda: _join(options))
    if options.searches_tree:
        check_one_process()
    prompts = from_primary(lambda: _read(options))  # before the models, which take longer

    spec = options.spec
    with exact_matmuls(str(resolve_dtype(spec.dtype))):
        with passing_note(f"loading {spec.base}"):
            # A tree that is searched for is found on the loaded models, from the draft's own on.
            models = load(dataclasses.replace(spec, tree=None) if options.searches_tree else spec)
        if prompts is None:
            # Only now: the prompts that come with a base lie in its folder, which loading finds.
            shipped = shipped_prompts(models.base.directory, "--prompt=TEXT or --prompts=FILE")
            prompts = from_primary(lambda: read_prompts(shipped)[:1])
        # Measured with as many slots as the rows will have.
        slots = min(options.batch_size, len(prompts))
        models = with_attention(models, spec.attention, slots)
        if options.searches_tree:
            rules = sampling_for(settings, []), settings.warping
            models = with_fastest_tree(models, prompts, slots, *rules, resumed=options.begun)
        say(template_notice(prompts, models.tokenizer))
        say(shape_notice(spec.base))
        say(quantization_notice(spec.int8))

        # Before anything is written: a tree may not suit its head or the rules of sampling.
        models.engine(1, sampling_for(settings, prompts), source_size=source_size(models, prompts))
        _notice_predictions(models, prompts)
        with _open_sink(options, settings, models, prompts) as sink:
            figures = _decode(options, settings, models, prompts, sink)
        return from_primary(lambda: figures)  # the others know no rows of earlier runs


def _join(options: GenerateOptions) -> dict[str, Any]:
    """Make one file of what the jobs of --shard wrote, and return the figures of its rows."""
    assert options.path is not None  # as the options have checked
    join_rows(options.path, options.overwrite)
    return RowTotals(read_rows(options.path)).to_dict()


def _read(options: GenerateOptions) -> Sequence[Prompt | BadPrompt] | None:
    if options.prompt is not None:
        return [text_prompt(options.prompt)]
    if options.prompts is None:
        return None
    # Strict: the first bad row ends the command; else it fails when its turn comes.
    return read_prompt_files(options.prompts, options.strict)


def _notice_predictions(models: Models, prompts: Sequence[Prompt | BadPrompt]) -> None:
    """Say once that predictions have no effect where nothing is copied."""
    given = [row for row in prompts if isinstance(row, Prompt) and row.prediction is not None]
    if given and not models.copies:
        how = "--copy=16" if models.draft else "--draft=lookup"
        say(f"{len(given)} rows bring a prediction, which nothing copies from: give {how}")


def _open_sink(
    options: GenerateOptions,
    settings: GenerationSettings,
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
) -> RowSink:
    if options.path is None:
        return RowPrinter(quiet=options.is_live)
    # Not the batch size: it changes no row, and a run may have to resume with a smaller one.
    depends_on = {
        "base": options.spec.base,
        "draft": options.spec.draft,
        "run_seed": options.seed,
        **settings.to_dict(),
        **identity_of(models),
    }
    return open_rows(options.path, prompts, depends_on, options.overwrite, options.part)


def _decode(
    options: GenerateOptions,
    settings: GenerationSettings,
    models: Models,
    prompts: Sequence[Prompt | BadPrompt],
    sink: RowSink,
) -> dict[str, Any]:
    # Rows of earlier runs count in the report, and are not decoded again.
    totals = RowTotals(sink.kept())
    tokens_before = totals.tokens
    if sink.finished:
        say(f"{sink.finished} rows are in {options.path} already")

    # The part of --shard, less what its file has already.
    rows = options.part.rows(len(prompts))
    stream = open_stream(
        models,
        prompts,
        settings,
        batch_size=1 if options.is_live else options.batch_size,
        seed=options.seed,
        # On a terminal a step at a time, for the eye; else as many as cost the host no time.
        steps_per_chunk=from_primary(lambda: 1 if options.is_live and sys.stdout.isatty() else 8),
        part=slice(rows.start + sink.finished, rows.stop),
        strict=options.strict or options.is_live,
        is_watched=options.is_live,
    )
    with CompileClock() as compiling, memory_advice(stream.batch_size):
        with passing_note("compiling"):
            stream.warm_up()
        started = compiling.now()
        if options.is_live:
            decode_live(stream, sink, totals, LiveText(sys.stdout, models.tokenizer))
        else:
            with _bar(options, len(rows), sink.finished, compiling) as bar:
                decode_with_bar(stream, sink, totals, bar, compiling)
        seconds = compiling.now() - started
        sink.note_seconds(seconds)  # a resumed run counts what came after the last row too

    new_tokens = totals.tokens - tokens_before
    # Without new tokens there is no speed.
    speed = round(new_tokens / seconds, 2) if new_tokens else None
    say(totals.summary(speed))
    return totals.to_dict() | {
        "seconds": round(sink.earlier_seconds + seconds, 3),
        "compile_seconds": round(compiling.seconds, 3),
        "tokens_per_second": speed,
        # Of this run alone, where it went on with an earlier one's rows.
        "new_tokens": new_tokens,
        "new_seconds": round(seconds, 3),
    }


def memory_advice(batch_size: int) -> AbstractContextManager[None]:
    """Return a context that turns a device's lack of memory into what to do about it."""
    return advise_on_memory(
        f"decode {batch_size} rows at once",
        "give a smaller --batch_size or --max_new_tokens, or --dtype=bfloat16",
    )


def _bar(options: GenerateOptions, total: int, finished: int, compiling: CompileClock) -> Progress:
    """Return a bar; unseen where the rows themselves go to the terminal that it would be on."""
    is_hidden = options.output is None and sys.stdout.isatty()
    file = io.StringIO() if is_hidden else None
    return progress_bar(total, "generate", "row", initial=finished, file=file, compiling=compiling)
