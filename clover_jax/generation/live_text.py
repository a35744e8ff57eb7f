"""Text on a terminal while it is decoded, so that one sees several tokens come at a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TextIO

from clover_jax.data.prompts import Prompt
from clover_jax.decoding.requests import Generation
from clover_jax.generation.row_job import RowJob
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.text_pieces import TextPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESET, _PROMPT = "\033[0m", "\033[2m"
# Shades of the text, in turns: what one forward of the base gave has one shade.
_STEPS = ("\033[32m", "\033[96m")


class Group(NamedTuple):
    """Tokens that came together: number 0 from prefill, number j + 1 from forward j."""

    number: int
    ids: list[int]


class LiveText:
    """Writes prompt and answer of one row at a time, as events come in.

    Without a terminal, or with NO_COLOR set, it writes the same text plain. Without a tokenizer it
    writes token ids.
    """

    def __init__(self, file: TextIO, tokenizer: PreTrainedTokenizerBase | None):
        """Write to `file`."""
        self._file, self._tokenizer = file, tokenizer
        self._in_colour = wants_colour(file)
        self._turn: Generation | None = None
        self._job: RowJob | None = None
        self._turn_number = 0  # within its row
        self._num_tokens = 0
        self._pieces = TextPieces(tokenizer)

    def take(self, event: RowEvent) -> None:
        """Write what an event brought."""
        if event.generation is None:
            return
        turn = event.generation
        if turn is not self._turn:
            self._begin(event.job, turn)
        for group in groups(turn, self._num_tokens):
            self._take_group(event.job, group)
        self._num_tokens = len(turn.output_ids)
        if event.turn_ended:
            self._finish(event.job)
        self._file.flush()

    def _begin(self, job: RowJob, turn: Generation) -> None:
        self._turn_number = self._turn_number + 1 if job is self._job else 0
        self._job, self._turn, self._num_tokens = job, turn, 0
        self._pieces.begin(turn.prompt_ids)
        shown = _prompt_text(job.prompt, self._turn_number)
        if shown is None and self._tokenizer is not None:
            shown = self._tokenizer.decode(turn.prompt_ids)
        elif shown is None:
            shown = " ".join(map(str, turn.prompt_ids)) + " "
        self._write(shown, _PROMPT)

    def _take_group(self, job: RowJob, group: Group) -> None:
        if self._tokenizer is None:
            text = "".join(f"{id_} " for id_ in group.ids)
        else:
            text = self._pieces.push(group.ids, job.settings.stop)
        self._write(text, _STEPS[group.number % len(_STEPS)])

    def _finish(self, job: RowJob) -> None:
        """Write what was held back and a newline."""
        self._write(self._pieces.rest(job.turns[-1].text), "")
        self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        if text:
            self._file.write(f"{style}{text}{_RESET}" if style and self._in_colour else text)


def groups(turn: Generation, first: int) -> Iterator[Group]:
    """Yield the tokens from number `first` on, by the forward that gave them.

    Example: ids 5 6 7 8 9 with accepted [2, 4] were given as (0, [5]), (1, [6, 7, 8]) and
    (2, [9]): a limit cut the rest of the last.
    """
    counts = [1, *(accepted + 1 for accepted in turn.accepted)]
    for number, end in enumerate(accumulate(counts)):
        ids = turn.output_ids[max(first, end - counts[number]) : end]
        if ids:
            yield Group(number, ids)


def wants_colour(file: TextIO) -> bool:
    """Return whether `file` is a terminal that shows colours and whose user wants them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not is_plain


def _prompt_text(prompt: Prompt, turn: int) -> str | None:
    """Return what to show of the prompt: for a conversation only what the user says now."""
    if prompt.turns is not None:
        return f"{prompt.turns[turn]}\n"
    if prompt.messages is not None:
        return f"{prompt.messages[-1]['content']}\n"
    return prompt.text
