"""Text on a terminal while it is decoded; the tokens of one forward have one shade."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.generation.row_state import Turn
from clover_jax.generation.row_stream import RowEvent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESET, _PROMPT = "\033[0m", "\033[2m"
# Alternating shades of the text: the tokens of one forward of the base have one shade.
_FORWARDS = ("\033[32m", "\033[96m")


class LiveText:
    """Writes prompt and answer of one row at a time, as events of watched rows come in.

    Without a terminal, or with NO_COLOR set, it writes the same text plain. Without a tokenizer it
    writes token ids.
    """

    def __init__(self, file: TextIO, tokenizer: PreTrainedTokenizerBase | None):
        self._file, self._tokenizer = file, tokenizer
        self._in_colour = wants_colour(file)
        self._turn_number = 0  # within its row
        self._is_begun = False

    def take(self, event: RowEvent) -> None:
        """Write what an event brought."""
        # A row without progress has failed or was skipped, which is reported elsewhere.
        progress = event.progress
        if progress is None or isinstance(event.prompt, BadPrompt):
            return
        # The prompt comes once, with the first news of its turn.
        if not self._is_begun:
            self._write(self._prompt_text(event.prompt, progress.turn), _PROMPT)
        for piece in progress.pieces:
            text = piece.text if self._tokenizer else "".join(f"{id_} " for id_ in piece.ids)
            self._write(text, _FORWARDS[piece.forward % len(_FORWARDS)])

        self._is_begun = not progress.ended
        if progress.ended:
            self._write("\n", "")
            # Counted for the prompt of a conversation; the next row begins anew.
            self._turn_number = 0 if event.row else self._turn_number + 1
        self._file.flush()

    def _prompt_text(self, prompt: Prompt, turn: Turn) -> str:
        """Return the text of a prompt; for a conversation only the user's newest turn."""
        # The template's own text around a question is noise to a reader.
        if prompt.turns is not None:
            return f"{prompt.turns[self._turn_number]}\n"
        if prompt.messages is not None:
            return f"{prompt.messages[-1]['content']}\n"
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(turn.prompt_ids))
        # Without a tokenizer the prompt is shown as ids, like the answer.
        return " ".join(map(str, turn.prompt_ids)) + " "

    def _write(self, text: str, style: str) -> None:
        if text:
            self._file.write(f"{style}{text}{_RESET}" if style and self._in_colour else text)


def wants_colour(file: TextIO) -> bool:
    """Return whether `file` is a terminal that shows colours and whose user wants them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not is_plain
