"""The tokens of each forward of the base in an answer, after EOS, limits and stop strings."""

from __future__ import annotations

from typing import NamedTuple

from clover_jax.decoding.row_state import TurnProgress, copied_parts, forward_groups

# Why an answer ended, in OpenAI's words.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Forward(NamedTuple):
    """One forward after prefill.

    num_accepted: tokens beyond the one that plain decoding would have given. num_drafted: drafted
        tokens that it verified. num_copied: how many of its tokens were copies of the text.
    """

    num_accepted: int
    num_drafted: int
    num_copied: int


def forwards_of(progress: TurnProgress) -> list[Forward]:
    """Return the forwards of an answer so far; their tokens are all of its tokens but the first.

    So 1 + accepted / forwards is the tau of the answer.
    """
    row, forwards = progress.generation, []
    # The turn ends where a stop string has cut it; the engine's result may go on.
    for number, ids in forward_groups(progress.turn, 1):
        # The first token is prefill's (number 0) and left out; forward n's figures are at n - 1.
        copied = sum(len(part) for part, is_copied in copied_parts(row, number, ids) if is_copied)
        forwards.append(Forward(len(ids) - 1, row.proposed[number - 1], copied))
    return forwards
