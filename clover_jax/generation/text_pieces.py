"""The text of one row as it settles: what neither a later token nor a stop string can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover_jax.decoding.requests import Generation
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.stop_strings import settled_length
from clover_jax.tokenizers.detokenization import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPieces:
    """Turns the tokens of one turn after the other into pieces; joined they are a turn's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        """Without a tokenizer every piece is empty."""
        self._tokenizer = tokenizer
        self._turn: Generation | None = None
        self._num_tokens = 0

    def take(self, event: RowEvent) -> str:
        """Return what an event settles of its turn's text."""
        turn = event.generation
        if turn is not self._turn:
            self._turn, self._num_tokens = turn, 0
            self.begin(turn.prompt_ids)
        # A stop string is found in text that later tokens of the same chunk may undo.
        ids = event.job.turns[-1].output_ids if event.turn_ended else turn.output_ids
        piece = self.push(ids[self._num_tokens :], event.job.settings.stop)
        self._num_tokens = len(ids)
        return piece + self.rest(event.job.turns[-1].text) if event.turn_ended else piece

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start the answer to a prompt."""
        self._text, self._num_given = "", 0
        if self._tokenizer is not None:
            self._stream = TextStream(self._tokenizer, prompt_ids)

    def push(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """Return what more tokens settle."""
        if self._tokenizer is None:
            return ""
        self._text += self._stream.push(ids)
        return self._until(settled_length(self._text, stops))

    def rest(self, text: str | None) -> str:
        """Return what was held back, up to where the answer, `text`, really ends."""
        if self._tokenizer is None:
            return ""
        self._text = text
        return self._until(len(text))

    def _until(self, end: int) -> str:
        piece = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece
