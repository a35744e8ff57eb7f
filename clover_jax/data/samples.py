"""Training samples by number, tokenised as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clover_jax.data.chat import Encoded, encode_record
from clover_jax.data.records import Record, Text, cut_text

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
    """Samples of records, in their order; long texts give one for each section."""

    hidden_names = ()

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        seq_len: int,
    ):
        """Cut texts for rows of `seq_len` tokens; nothing is tokenised yet."""
        self.sections = _sections(records, CHARS_PER_TOKEN * seq_len)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def __len__(self) -> int:
        return len(self.sections)

    def __getitem__(self, index: int) -> Encoded:
        """Tokenise; raises UserError as `encode_record` does."""
        return encode_record(self.sections[index], self._tokenizer, self._vocab_size)


def _sections(records: Sequence[Record], max_chars: int) -> list[Record]:
    sections: list[Record] = []
    for record in records:
        sections += cut_text(record, max_chars) if isinstance(record, Text) else [record]
    return sections
