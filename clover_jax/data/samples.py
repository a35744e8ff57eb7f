"""Training samples by number, tokenized when they are read, and checks of what they hold.

`train` checks some samples of raw data, `prepare` all of them; both use the same limits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from clover_jax.data.chat import Encoded, encode_record
from clover_jax.data.records import Record, Text, cut_text
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Sections of long texts are shuffled apart: a batch should not come from one document.
CHARS_PER_TOKEN = 3
# A smaller share of samples may be refused, and is left out.
MAX_REFUSED = 0.05
LOOKED_AT = 64  # samples of data that are not all read beforehand


def learnable_pieces(loss_mask: np.ndarray, seq_len: int) -> list[slice]:
    """Return the pieces, of at most `seq_len` tokens, that have a pair to learn from.

    Example: 8 tokens that count, with seq_len 3, give pieces of 3 and 3; the last has no pair.
    """
    pieces = [slice(at, at + seq_len) for at in range(0, len(loss_mask), seq_len)]
    # A pair reads a token, and then two that count: the one emitted last and the one drafted.
    is_pair = loss_mask[1:] & loss_mask[:-1]
    return [piece for piece in pieces if is_pair[piece][1 : seq_len - 1].any()]


class Samples(Protocol):
    """Random access to samples; what the pipeline reads.

    hidden_names: activations that are stored for every token; none for an online teacher.
    """

    hidden_names: tuple[str, ...]

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int) -> Encoded:
        """Return sample `index`."""

    def hidden(self, index: int) -> Mapping[str, np.ndarray]:
        """Return name -> [n, ..] of sample `index`; asked for only where there are names."""


class Reading(NamedTuple):
    """How records become samples: by a base's tokenizer, None where it has none, for its V.

    seq_len: tokens of a row. eos_token_ids: the base's.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    seq_len: int
    eos_token_ids: tuple[int, ...] = ()


class RecordSamples:
    """Samples of records, in their order; long texts give one for each section.

    refused: number of a sample -> why it cannot be tokenized. Such a sample is empty: one row that
        the chat template does not understand must not end a run that has begun.
    """

    hidden_names: tuple[str, ...] = ()

    def __init__(self, records: Sequence[Record], reading: Reading):
        """Cut texts for rows of the reading's length; nothing is tokenized yet."""
        self.reading, self.sections = reading, list[Record]()
        for record in records:
            # A long document's sections are shuffled apart; a conversation is cut only later.
            if isinstance(record, Text):
                self.sections += cut_text(record, CHARS_PER_TOKEN * reading.seq_len)
            else:
                self.sections.append(record)
        self.refused: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.sections)

    def __getitem__(self, index: int) -> Encoded:
        tokenizer, vocab_size = self.reading.tokenizer, self.reading.vocab_size
        try:
            return encode_record(self.sections[index], tokenizer, vocab_size)
        except UserError as error:
            if index not in self.refused:
                self.refused[index] = str(error)
                count = len(self.refused)
                # Printed for 1, 10, 100 ... of them: the run goes on, and may be long.
                if str(count).strip("0") == "1":
                    say(f"left out {'a sample' if count == 1 else f'{count} samples'}: {error}")
            return Encoded(np.zeros(0, np.int32), np.zeros(0, bool))

    def hidden(self, index: int) -> Mapping[str, np.ndarray]:
        """Return nothing: only prepared samples have activations."""
        return {}


@dataclasses.dataclass
class SampleCounts:
    """Counts of samples.

    tokens, counted: all, and those that the base is imitated on.
    pieces: rows' worth of a sample at most, with a pair to learn from; what is trained on.
    conversations, cut: those with an end to be cut off, and how many are longer than a row.
    answered, ended: conversations with an answer, and those with one that ends in an EOS token.
    without_answer: samples that nothing can be learned from.
    refused, reason: samples that cannot be tokenized, and what is wrong with the first.
    """

    samples: int = 0
    tokens: int = 0
    counted: int = 0
    pieces: int = 0
    conversations: int = 0
    cut: int = 0
    longest: int = 0
    answered: int = 0
    ended: int = 0
    without_answer: int = 0
    refused: int = 0
    reason: str | None = None

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, Any]]) -> SampleCounts:
        """Return the counts of several shards, each as `to_dict` gave them, as one."""
        total = cls()
        for part in parts:
            # Shards of earlier versions have no pieces: where tokens count, some are there.
            for name, value in {"pieces": part["counted"], **part}.items():
                before = getattr(total, name)
                if name == "reason":
                    total.reason = before or value
                else:
                    setattr(
                        total, name, max(before, value) if name == "longest" else before + value
                    )
        return total

    def add(self, samples: RecordSamples, index: int) -> Encoded:
        """Count sample `index` and return it."""
        record, sample = samples.sections[index], samples[index]
        size, is_conversation = len(sample.tokens), not isinstance(record, Text)
        self.samples += 1
        # `samples[index]` above has tokenized it, which is when a refusal is found.
        if index in samples.refused:
            self.refused += 1
            self.reason = self.reason or samples.refused[index]

        self.tokens += size
        self.counted += int(sample.loss_mask.sum())
        self.pieces += len(learnable_pieces(sample.loss_mask, samples.reading.seq_len))
        self.without_answer += not sample.loss_mask.any()
        # A text is in sections anyway; what is cut off a conversation no longer sees its beginning.
        if is_conversation:
            self.conversations += 1
            self.cut += size > samples.reading.seq_len
            self.longest = max(self.longest, size)
            self.answered += bool(sample.loss_mask.any())
            # The last token of each run of tokens that count.
            is_last = sample.loss_mask & ~np.append(sample.loss_mask[1:], False)
            self.ended += bool(
                np.isin(sample.tokens[is_last], list(samples.reading.eos_token_ids)).any()
            )
        return sample

    def check(self, samples: RecordSamples, max_cut: float | None = None) -> None:
        """Raise UserError where nothing can be learned, or too many samples are refused or cut."""
        if self.refused > MAX_REFUSED * self.samples:
            raise UserError(
                f"{self._part_of(samples)}{self.refused} of {self.samples} samples cannot be used, "
                f"the first since {self.reason}"
            )

        # Nothing to learn, for one reason or another.
        if not self.counted:
            raise UserError(
                f"none of the {self.tokens} tokens in {self.samples} samples is an assistant's: "
                "there is nothing to learn; give conversations with answers (messages with role "
                "assistant, or prompt and response), or plain text"
            )
        if not self.pieces:
            raise UserError(
                f"no answer of the {self.samples} samples has two tokens in one row of --seq_len; "
                "the second is the first that a head drafts: there is nothing to learn; give "
                "longer answers"
            )

        if max_cut is not None and self.cut > max_cut * self.conversations:
            raise UserError(
                f"{self._part_of(samples)}{self.cut} of {self.conversations} conversations "
                f"({100 * self.cut / self.conversations:.0f} %) are longer than "
                f"--seq_len={samples.reading.seq_len} and would be truncated (the longest has "
                f"{self.longest} tokens), more than --max_truncated={max_cut:g} allows; raise one "
                "of the two"
            )

    def warnings(self, samples: RecordSamples) -> list[str]:
        """Return warnings about samples that can be trained on."""
        lines = []
        # What is left out, and what loses its context.
        if self.without_answer:
            lines.append(
                f"{self.without_answer} of {self.samples} samples have no answer to learn from and "
                "are left out"
            )
        if self.cut:
            lines.append(
                f"{self.cut} of {self.conversations} conversations are longer than "
                f"--seq_len={samples.reading.seq_len} and are cut: each piece is trained without "
                "the text before it"
            )

        # Without an end in any answer the template, or the base's config, is the likely mistake.
        if self.answered and samples.reading.eos_token_ids and not self.ended:
            ids = ", ".join(map(str, sorted(samples.reading.eos_token_ids)))
            lines.append(
                f"no answer in {self.answered} conversations ends in an end-of-sequence token "
                f"({ids}): the head will not learn to draft one; does the chat template end turns?"
            )
        return [self._part_of(samples) + line for line in lines]

    def judge(self, samples: RecordSamples, max_cut: float | None = None) -> None:
        """Print the warnings; raise UserError as `check` does."""
        self.check(samples, max_cut)
        for line in self.warnings(samples):
            say(line)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a manifest."""
        return dataclasses.asdict(self)

    def _part_of(self, samples: RecordSamples) -> str:
        is_part = self.samples < len(samples)
        return f"{self.samples} of {len(samples)} samples were looked at: " if is_part else ""


def look_at(samples: RecordSamples, count: int = LOOKED_AT) -> SampleCounts:
    """Count some samples, spread evenly; go on until one of them teaches something."""
    # The whole range, since files are often sorted by where their rows come from.
    stride = max(1, len(samples) // count)
    spread = range(0, len(samples), stride)
    others = (index for index in range(len(samples)) if index % stride)
    counts = SampleCounts()
    for index in itertools.chain(spread, others):
        # All that are spread; further ones only while none teaches anything.
        if counts.samples >= len(spread) and counts.pieces:
            break
        counts.add(samples, index)
    return counts
