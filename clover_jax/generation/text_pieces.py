"""The text of one row as it settles: what neither a later token nor a stop string can change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clover_jax.decoding.requests import Generation
from clover_jax.generation.row_job import spelling_context
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.stop_strings import settled_length
from clover_jax.models.tokenizer import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPieces:
    """Turns the events of a row into pieces of text; joined they are the turn's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        """Without a tokenizer every piece is empty."""
        self._tokenizer = tokenizer
        self._turn: Generation | None = None

    def take(self, event: RowEvent) -> str:
        """Return what an event settles of its turn's text."""
        if self._tokenizer is None:
            return ""
        turn = event.generation
        if turn is not self._turn:
            self._turn, self._text, self._num_tokens, self._num_given = turn, "", 0, 0
            self._stream = TextStream(self._tokenizer, spelling_context(turn.prompt_ids))
        self._text += self._stream.push(turn.output_ids[self._num_tokens :])
        self._num_tokens = len(turn.output_ids)
        end = settled_length(self._text, event.job.settings.stop)
        if event.turn_ended:
            self._text = event.job.turns[-1].text
            end = len(self._text)
        piece = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece
