"""Training samples by number, tokenised as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clover_jax.data.chat import Encoded, encode_record
from clover_jax.data.records import Record, Text, cut_text
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Sections of long texts are shuffled apart: a batch should not come from one document.
CHARS_PER_TOKEN = 3


def learnable_pieces(loss_mask: np.ndarray, seq_len: int) -> list[slice]:
    """Return the pieces, of at most `seq_len` tokens, that have a pair to learn from.

    Example: 5 tokens that all count, with seq_len 2, give pieces of 2 and 2: the last token alone
    has no pair.
    """
    pieces = [slice(at, at + seq_len) for at in range(0, len(loss_mask), seq_len)]
    # The mask of a piece's last token never counts: its target lies beyond.
    return [piece for piece in pieces if loss_mask[piece][:-1].any()]


class Samples(Protocol):
    """Random access to samples; what the pipeline reads.

    hidden_names: what a cached teacher knows of every token; nothing for an online one.
    """

    hidden_names: tuple[str, ...]

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int) -> Encoded:
        """Return sample `index`."""

    def hidden(self, index: int) -> Mapping[str, np.ndarray]:
        """Return name -> [n, ..] of sample `index`; asked for only where there are names."""


class RecordSamples:
    """Samples of records, in their order; long texts give one for each section.

    refused: number of a sample -> why it cannot be tokenised. Such a sample is empty: one row that
        the chat template does not understand must not end a run that has begun.
    """

    hidden_names: tuple[str, ...] = ()

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        seq_len: int,
        eos_token_ids: Sequence[int] = (),
    ):
        """Cut texts for rows of `seq_len` tokens; nothing is tokenised yet."""
        self.sections: list[Record] = []
        for record in records:
            # A long document's sections are shuffled apart; a conversation is cut only later.
            if isinstance(record, Text):
                self.sections += cut_text(record, CHARS_PER_TOKEN * seq_len)
            else:
                self.sections.append(record)
        self.seq_len, self.eos_token_ids = seq_len, eos_token_ids
        self.refused: dict[int, str] = {}
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def __len__(self) -> int:
        return len(self.sections)

    def __getitem__(self, index: int) -> Encoded:
        try:
            return encode_record(self.sections[index], self._tokenizer, self._vocab_size)
        except UserError as error:
            self._refuse(index, str(error))
            return Encoded(np.zeros(0, np.int32), np.zeros(0, bool))

    def hidden(self, index: int) -> Mapping[str, np.ndarray]:
        """Return nothing: only prepared samples have activations."""
        return {}

    def _refuse(self, index: int, reason: str) -> None:
        if index in self.refused:
            return
        self.refused[index] = reason
        # Each time that there are ten times as many: the run goes on, and may be long.
        if str(len(self.refused)).strip("0") == "1":
            number = f"{len(self.refused)} samples" if len(self.refused) > 1 else "a sample"
            say(f"left out {number}: {reason}")
