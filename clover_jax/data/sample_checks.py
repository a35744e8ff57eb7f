"""What samples hold, counted; and what is wrong with them, said before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from clover_jax.data.chat import Encoded, after_first_question
from clover_jax.data.records import Conversation, Record, Text
from clover_jax.data.samples import RecordSamples, learnable_pieces
from clover_jax.errors import UserError

DEFAULT_MAX_CUT = 0.05
# Of data that are not read whole beforehand, so many samples are looked at.
LOOKED_AT = 64


@dataclasses.dataclass
class SampleCounts:
    """What was counted.

    tokens, counted: all, and those that the base is imitated on.
    pieces: rows' worth of a sample at most, with a pair to learn from; what is trained on.
    conversations, cut: those with an end to be cut off, and how many are longer than a row.
    without_answer: samples that nothing can be learnt from.
    """

    samples: int = 0
    tokens: int = 0
    counted: int = 0
    pieces: int = 0
    conversations: int = 0
    cut: int = 0
    longest: int = 0
    without_answer: int = 0

    def add(self, record: Record, encoded: Encoded, seq_len: int) -> None:
        """Count a sample.

        Raises UserError for an answer of which no token counts.
        """
        size, is_conversation = len(encoded.tokens), not isinstance(record, Text)
        self.samples += 1
        self.tokens += size
        self.counted += int(encoded.loss_mask.sum())
        self.pieces += len(learnable_pieces(encoded.loss_mask, seq_len))
        self.conversations += is_conversation
        self.cut += is_conversation and size > seq_len
        self.longest = max(self.longest, size if is_conversation else 0)
        if not encoded.loss_mask.any():
            self.without_answer += 1
            _refuse_lost_answer(record)

    def check(self, seq_len: int, max_cut: float) -> None:
        """Raise UserError where nothing can be learnt, or too much would be cut."""
        if not self.counted:
            raise UserError(
                f"none of the {self.tokens} tokens in {self.samples} samples is an assistant's: "
                "there is nothing to learn; give conversations with answers (messages with role "
                "assistant, or prompt and response), or plain text"
            )
        if not self.pieces:
            raise UserError(
                f"each of the {self.samples} samples counts no token but the last of a row, after "
                "which there is none to draft: there is nothing to learn; give longer answers"
            )
        if self.cut > max_cut * self.conversations:
            raise UserError(
                f"{self.cut} of {self.conversations} conversations "
                f"({100 * self.cut / self.conversations:.0f} %) are longer than "
                f"--seq_len={seq_len} and would be truncated (the longest has {self.longest} "
                f"tokens), more than --max_truncated={max_cut:g} allows; raise one of the two"
            )

    def to_dict(self) -> dict[str, int]:
        """Return the counts for a manifest."""
        return dataclasses.asdict(self)


def _refuse_lost_answer(record: Record) -> None:
    answers = after_first_question(record.messages) if isinstance(record, Conversation) else ()
    if any(role == "assistant" and content.strip() for role, content in answers):
        raise UserError(
            f"{record.source}: the loss mask is all zero although the assistant says something; "
            "the base's chat template leaves the answer out: give another --chat_template"
        )


def look_at(samples: RecordSamples, seq_len: int, count: int = LOOKED_AT) -> SampleCounts:
    """Count some samples, spread evenly; on until one of them teaches something."""
    stride = max(1, len(samples) // count)
    spread = list(range(0, len(samples), stride))
    counts = SampleCounts()
    for index in [*spread, *_others(len(samples), stride)]:
        if counts.samples >= len(spread) and counts.pieces:
            break
        counts.add(samples.sections[index], samples[index], seq_len)
    return counts


def _others(size: int, stride: int) -> Sequence[int]:
    return [index for index in range(size) if index % stride]
