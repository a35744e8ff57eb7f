"""Decode the same prompts with a head before and after its conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.chat_templates import with_chat_template
from clover_jax.data.prepared import heldout_rows, is_prepared
from clover_jax.data.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
from clover_jax.data.readers import read_records
from clover_jax.data.records import Record
from clover_jax.decoding.tree_config import default_tree, parse_tree
from clover_jax.errors import UserError
from clover_jax.generation.row_stream import open_stream
from clover_jax.generation.row_totals import RowTotals
from clover_jax.generation.settings import GenerationSettings
from clover_jax.interchange.directory import read_draft
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.loading.models import Models
from clover_jax.pretrained.base import BaseModel
from clover_jax.runtime.progress import say
from clover_jax.tokenizers.tokenizer import load_tokenizer
from clover_jax.training.decoding_eval import evaluation_prompts

BATCH_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of decoding with both heads, as it is reported.

    prompts: how many were decoded. differing: indices of those whose accepted lengths or tokens do.
    """

    tau_source: float
    tau_result: float
    prompts: int
    differing: list[int]


def verification_prompts(
    base: BaseModel, head: StoredHead, path: str | None, count: int
) -> list[Prompt]:
    """Return up to `count` prompts: of a file, else those that came with the base.

    Where neither is there, the beginnings of the data that the head was trained with; where that
    is not here any more, single tokens, which the base continues as it likes.
    """
    # A file that was named must be there; the base's own may be missing.
    file = Path(path).expanduser() if path else base.directory / SHIPPED_PROMPTS
    if path or file.is_file():
        return read_prompts(file)[:count]

    flags = head.card.provenance.get("flags") or {}
    data = flags.get("data")
    try:
        ids = _openings(data, flags.get("chat_template"), base, count) if data else []
        source = f"--data={data}, which the head was trained with"
    except UserError as error:
        # Heads travel, and their data stay where they were; any text tells two heads apart.
        say(f"the data of this head cannot be read here: {error}")
        ids = []
    if not ids:
        # Spread over the vocabulary, since many vocabularies begin with special tokens and bytes.
        step = max(1, base.config.vocab_size // count)
        ids = [[token] for token in range(0, base.config.vocab_size, step)]
        source = "single tokens of the base's vocabulary"
    say(f"prompts to verify with: {source}")
    return [Prompt(index, source, prompt_ids=tuple(row)) for index, row in enumerate(ids[:count])]


def _openings(data: str, template: str | None, base: BaseModel, count: int) -> list[list[int]]:
    if is_prepared(data):
        records: Sequence[Record] = heldout_rows(Path(data).expanduser())
    else:
        # Of small data little is held out; what a head has seen compares it as well.
        split = read_records(data)
        records = split.heldout + split.train
    tokenizer = with_chat_template(load_tokenizer(base.directory), template)
    return evaluation_prompts(None, records, base, tokenizer, count)


def verify(
    base: Models,
    source: StoredHead,
    result: StoredHead,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> Verification:
    """Decode greedily with both heads and compare row by row."""
    # One tree for both: a foreign layout does not say which tree its head was measured with.
    tree = parse_tree(source.card.tree or default_tree(source.config.max_depth))
    settings = GenerationSettings(max_new_tokens=max_new_tokens)

    def rows(head: StoredHead) -> dict[int, dict[str, Any]]:
        models = dataclasses.replace(base, draft=read_draft(head, base.dtype), tree=tree)
        # Strict: a row that fails would compare equal to another that fails.
        stream = open_stream(models, prompts, settings, batch_size=BATCH_SIZE, strict=True)
        return {event.row["index"]: event.row for event in stream if event.row is not None}

    one, other = rows(source), rows(result)
    # Lengths too: a spoilt head gives the same text, in more steps.
    keys = ("accepted", "output_ids")
    differing = [
        index for index in one if any(one[index][key] != other[index][key] for key in keys)
    ]
    return Verification(_tau(one), _tau(other), len(one), differing)


def _tau(rows: dict[int, dict[str, Any]]) -> float:
    return round(RowTotals(rows.values()).tau or 0.0, 4)
