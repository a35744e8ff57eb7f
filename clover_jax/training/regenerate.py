"""Self-distillation: replace the answers in training data by those that the base gives itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.prepared import REGENERATED
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import Conversation, Record, Text, TokenRow, parse_row
from clover_jax.decoding.generate_run import memory_advice
from clover_jax.decoding.identity import identity_of
from clover_jax.decoding.models import load
from clover_jax.decoding.output import decode_with_bar, open_rows
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_stream import open_stream
from clover_jax.decoding.row_totals import RowTotals
from clover_jax.errors import UserError
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.jsonl import read_rows
from clover_jax.runtime.progress import passing_note, progress_bar
from clover_jax.training.prepare_options import PrepareOptions


def answer(records: Sequence[Record], options: PrepareOptions) -> dict[str, Any]:
    """Answer the conversations, answer by answer, and return the figures.

    The rows are kept in OUTPUT/regenerated.jsonl, as `generate` writes them, and a stopped run is
    resumed. Several processes do it together, as for `generate`.
    Raises UserError for text, which has no answers.
    """
    # Before the models: a text among the records is a mistake that needs no base to be found.
    prompts = [_prompt(index, record) for index, record in enumerate(records)]
    with passing_note(f"loading {options.spec.base}"):
        models = load(options.spec)

    # A conversation that outgrows the context is left out, not cut: its answers would be others.
    settings = GenerationSettings(
        **vars(options.warping), max_new_tokens=options.max_new_tokens, context_overflow="skip"
    )

    path = options.directory / REGENERATED
    depends_on = {"run_seed": options.seed, **settings.to_dict(), **identity_of(models)}
    with open_rows(path, prompts, depends_on, options.overwrite) as rows:
        figures, done = RowTotals(rows.kept()), rows.finished
        # Where nothing is left, an engine would be compiled for nothing.
        if done < len(prompts):
            stream = open_stream(
                models,
                prompts,
                settings,
                batch_size=options.batch_size,
                seed=options.seed,
                part=slice(done, None),
            )
            with (
                CompileClock() as clock,
                progress_bar(
                    len(prompts), "regenerate", "row", initial=done, first_compiles=True
                ) as bar,
                memory_advice(options.batch_size),
            ):
                decode_with_bar(stream, rows, figures, bar, clock)
    return figures.to_dict()


def read_answered(directory: Path) -> list[Record]:
    """Return the records with the answers that were kept in a folder.

    Raises UserError where no row could be decoded.
    """
    # Rows that failed or were left out have no answer. Row 0 is the file's line 1.
    path = directory / REGENERATED
    answered = (row for row in read_rows(path) if "output_ids" in row)
    records = [
        record for row in answered for record in parse_row(row, f"{path}:{row['index'] + 1}")
    ]
    if not records:
        raise UserError(f"{path}: no row could be decoded; its rows say why")
    return records


def _prompt(index: int, record: Record) -> Prompt:
    """Return what the base is asked: the user's turns, or the ids before the first answer."""
    if isinstance(record, Text):
        raise UserError(
            f"{record.source}: plain text has no answers to regenerate; give conversations, or "
            "leave out --regenerate"
        )
    if isinstance(record, Conversation):
        return _conversation_prompt(index, record)
    # Later turns replied to answers that are replaced now.
    ids = record.prompt_ids if isinstance(record, TokenRow) else record.turns[0][0]
    return Prompt(index, record.source, prompt_ids=ids)


def _conversation_prompt(index: int, record: Conversation) -> Prompt:
    """Return system messages and the user's turns.

    Messages of one side in a row are one turn; an answer before the first question is left out.
    """
    # The system speaks before the first turn, wherever its message was found.
    system = [content for role, content in record.messages if role == "system"]
    others = [message for message in record.messages if message[0] != "system"]
    runs = itertools.groupby(others, key=lambda message: message[0] == "assistant")
    turns = ["\n".join(content for _, content in run) for is_answer, run in runs if not is_answer]
    if not turns:
        raise UserError(f"{record.source}: nobody asks anything, so there is nothing to answer")
    messages = tuple({"role": "system", "content": content} for content in system)
    return Prompt(index, record.source, messages=messages or None, turns=tuple(turns))
