"""Decode the same prompts with a head before and after its conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.prompts import Prompt, read_prompts
from clover_jax.decoding.tree import default_tree, parse_tree
from clover_jax.errors import UserError
from clover_jax.generation.row_stream import open_stream
from clover_jax.generation.run import SHIPPED_PROMPTS
from clover_jax.generation.settings import GenerationSettings
from clover_jax.interchange.directory import read_draft
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.loading.models import Models

BATCH_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Verification:
    """What decoding with both heads gave.

    rows: prompts decoded. differing: indices of those whose accepted lengths or tokens differ.
    """

    tau_source: float
    tau_result: float
    rows: int
    differing: list[int]

    def to_dict(self) -> dict[str, Any]:
        """Return what to report."""
        return {
            "tau_source": round(self.tau_source, 4),
            "tau_result": round(self.tau_result, 4),
            "prompts": self.rows,
            "differing": self.differing,
        }


def held_out_prompts(base: Path, path: str | None, count: int) -> list[Prompt]:
    """Return the first prompts of a file, or of those that came with the base in a folder.

    Raises UserError where there are none.
    """
    file = Path(path).expanduser() if path else base / SHIPPED_PROMPTS
    if not file.is_file():
        raise UserError(f"{file} is not there, so nothing can be decoded; give --prompts=FILE")
    return read_prompts(file)[:count]


def verify(
    base: Models,
    source: StoredHead,
    result: StoredHead,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> Verification:
    """Decode greedily with both heads and compare row by row."""
    tree = source.card.tree or default_tree(source.config.max_depth)
    settings = GenerationSettings(max_new_tokens=max_new_tokens)
    one, other = (
        _rows(_with_head(base, head, tree), prompts, settings) for head in (source, result)
    )
    keys = ("accepted", "output_ids")
    differing = [
        index for index in one if any(one[index][key] != other[index][key] for key in keys)
    ]
    return Verification(_tau(one), _tau(other), len(one), differing)


def _with_head(base: Models, stored: StoredHead, tree: str) -> Models:
    draft = read_draft(stored, base.dtype)
    return dataclasses.replace(base, draft=draft, tree=parse_tree(tree))


def _rows(
    models: Models, prompts: Sequence[Prompt], settings: GenerationSettings
) -> dict[int, dict[str, Any]]:
    stream = open_stream(models, prompts, settings, batch_size=BATCH_SIZE, strict=True)
    return {event.row["index"]: event.row for event in stream if event.row is not None}


def _tau(rows: dict[int, dict[str, Any]]) -> float:
    """Return tokens per forward over all rows, their first tokens left out."""
    turns = [turn for row in rows.values() for turn in _turns(row)]
    forwards = sum(len(accepted) for accepted, _ in turns)
    return sum(len(ids) - 1 for _, ids in turns) / max(1, forwards)


def _turns(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return (accepted, output_ids) of each turn; a row of several turns holds lists of lists."""
    accepted, ids = row["accepted"], row["output_ids"]
    return (
        list(zip(accepted, ids, strict=True))
        if ids and isinstance(ids[0], list)
        else [(accepted, ids)]
    )
