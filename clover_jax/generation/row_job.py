"""One prompt row on its way through the engine, its turns played one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.decoding.requests import Generation, Progress, Request
from clover_jax.errors import UserError
from clover_jax.generation.overflow import fit_context
from clover_jax.generation.settings import GenerationSettings
from clover_jax.generation.stop_strings import StopCut, StopSearch
from clover_jax.loading.models import Models
from clover_jax.tokenizers.detokenization import TextStream, decode_text


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer, in the keys and the order of an output row."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    accepted: list[int]
    target_forwards: int
    tau: float | None
    seconds: float
    finish_reason: str


class RowJob:
    """A row that is being decoded.

    turns: its answers so far. num_cut: of each turn's prompt, the tokens that the context had no
        room for.
    """

    def __init__(self, prompt: Prompt, settings: GenerationSettings, models: Models):
        """Take the row; raises UserError for what it asks for and cannot have."""
        self.prompt = prompt
        self.settings = settings.for_row(prompt)
        self.turns: list[Turn] = []
        self.num_cut: list[int] = []
        self._models = models
        if self.settings.stop and models.tokenizer is None:
            raise UserError(
                f"{prompt.source}: stop strings need the base's tokenizer files, which are "
                "missing; leave stop out"
            )

    @property
    def is_finished(self) -> bool:
        """Whether every turn has its answer."""
        return len(self.turns) == self.prompt.num_turns

    def next_request(self) -> Request:
        """Return what to decode for the next turn.

        Raises UserError or Skipped when the turn cannot be decoded, naming the row.
        """
        base, source = self._models.base.config, self.prompt.source
        answers = [turn.text for turn in self.turns]
        ids = encode_prompt(self.prompt, self._models.tokenizer, base.vocab_size, answers)
        fitting = fit_context(ids, base, self.settings, source)
        self.num_cut.append(len(ids) - len(fitting))
        eos = () if self.settings.ignore_eos else base.eos_token_ids
        self._stop_search = StopSearch(
            self.settings.stop, lambda: TextStream(self._models.tokenizer, fitting)
        )
        return Request(
            self.prompt.index,
            fitting,
            self.settings.max_new_tokens,
            eos,
            temperature=self.settings.temperature,
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            seed=self.settings.seed,
            turn=len(self.turns),
        )

    def take(self, progress: Progress) -> bool:
        """Take in new tokens of the current turn; stop it at a stop string.

        Returns whether the turn has ended.
        """
        row = progress.row
        cut = self._stop_search.take(row.output_ids)
        if cut is not None:
            progress.stop()
            self.turns.append(_stopped_turn(row, cut))
        elif progress.done:
            self.turns.append(_turn(row, self._text(row)))
        return cut is not None or progress.done

    def output_row(self) -> dict[str, Any]:
        """Return the finished row's output; with several turns each value is a list."""
        columns = [dataclasses.asdict(turn) for turn in self.turns]
        if self.prompt.num_turns == 1:
            return {"index": self.prompt.index, **columns[0]}
        joined = {name: [column[name] for column in columns] for name in columns[0]}
        return {"index": self.prompt.index, **joined}

    def _text(self, row: Generation) -> str | None:
        """Return the text that continues the prompt; None without a tokenizer."""
        if self._models.tokenizer is None:
            return None
        return decode_text(self._models.tokenizer, row.output_ids, row.prompt_ids)


def forwards_until(accepted: Sequence[int], num_tokens: int) -> int:
    """Return how many forwards it took to emit a number of tokens, prefill's own included.

    Example: accepted [2, 0, 3] emits 1 + 3 + 1 + 4 tokens, so 1 token took 0 forwards, 4 took 1,
    5 took 2 and 6 took 3.
    """
    emitted = 1
    for forwards, count in enumerate(accepted):
        if emitted >= num_tokens:
            return forwards
        emitted += count + 1
    return len(accepted)


def _turn(row: Generation, text: str | None) -> Turn:
    return Turn(
        prompt_ids=row.prompt_ids,
        output_ids=row.output_ids,
        text=text,
        accepted=row.accepted,
        target_forwards=row.target_forwards,
        tau=row.tau,
        seconds=round(row.seconds, 6),
        finish_reason=row.finish_reason,
    )


def _stopped_turn(row: Generation, cut: StopCut) -> Turn:
    """Return the turn that ends before the stop string, with the forwards that its tokens took.

    Those beyond are cut like the tokens they gave, so that tau is 1 for plain decoding.
    """
    forwards = forwards_until(row.accepted, cut.num_kept)
    return Turn(
        prompt_ids=row.prompt_ids,
        output_ids=row.output_ids[: cut.num_kept],
        text=cut.text,
        accepted=row.accepted[:forwards],
        target_forwards=forwards,
        tau=(cut.num_kept - 1) / forwards if forwards else None,
        seconds=round(row.seconds, 6),
        finish_reason="stop",
    )
