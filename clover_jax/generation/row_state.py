"""One prompt row in the engine, its turns decoded one after the other."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.decoding.requests import Generation, Request, RowUpdate
from clover_jax.errors import UserError
from clover_jax.generation.answer_text import AnswerText, StopCut
from clover_jax.generation.overflow import fit_context
from clover_jax.generation.settings import GenerationSettings, Grain
from clover_jax.loading.models import Models
from clover_jax.tokenizers.detokenization import TextStream


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer, in the keys and the order of an output row.

    text: None without a tokenizer, and while tokens still come. finish_reason: None likewise.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    accepted: list[int]
    target_forwards: int
    tau: float | None
    seconds: float
    finish_reason: str | None


class Piece(NamedTuple):
    """A piece of an answer: the tokens of one forward, or more or less, by `watched_by`.

    forward: its number, 0 for prefill; of several the last. ids: its tokens.
    text: what is settled now, by tokens and stop strings; "" without a tokenizer.
    is_copied: whether the tokens were copied from the text; False where that is not tracked.
    is_settled: whether a stop string that later tokens complete leaves all tokens so far.
    """

    forward: int
    ids: list[int]
    text: str
    is_copied: bool = False
    is_settled: bool = True


@dataclasses.dataclass(frozen=True)
class TurnProgress:
    """The news of a row's current turn.

    turn: the answer so far, or all of it when `ended`; a stop string has cut it then.
    generation: the engine's result, with what was drafted, and tokens beyond a cut.
    pieces: of a row that is watched, its new tokens and text, in parts.
    num_cut: tokens of the turn's prompt that the context had no room for.
    """

    turn: Turn
    generation: Generation
    pieces: list[Piece]
    ended: bool
    num_cut: int


class RowState:
    """A row that is being decoded: its answers so far, and the text of the current one."""

    def __init__(
        self,
        prompt: Prompt,
        settings: GenerationSettings,
        models: Models,
        watched_by: Grain | None = None,
    ):
        """Take the row; raises UserError for settings that it cannot have.

        watched_by: the unit of a piece of streamed text: a chunk of steps, a forward, or the
            copies within a forward. Each costs the host more than the one before. None where the
            text is needed only at the end.
        """
        self.prompt = prompt
        self._settings = settings.for_row(prompt)
        self._models, self._watched_by = models, watched_by
        self._turns: list[Turn] = []
        # Stop strings are looked for in text; ids alone have none.
        if self._settings.stop and models.tokenizer is None:
            raise UserError(
                f"{prompt.source}: stop strings need the base's tokenizer files, which are "
                "missing; leave stop out"
            )

    @property
    def is_finished(self) -> bool:
        """Whether every turn has its answer."""
        return len(self._turns) == self.prompt.num_turns

    @property
    def is_followed(self) -> bool:
        """Whether its text is needed before its end: it is streamed, or may be cut."""
        return bool(self._watched_by or self._settings.stop)

    def next_request(self) -> Request:
        """Return what to decode for the next turn.

        Raises UserError or Skipped when the turn cannot be decoded, naming the row.
        """
        base, tokenizer = self._models.base.config, self._models.tokenizer
        # The text, not the ids: a template may rewrite an answer once it lies in the past.
        answers = [turn.text or "" for turn in self._turns]
        ids = encode_prompt(self.prompt, tokenizer, base.vocab_size, answers)
        fitting = fit_context(ids, base, self._settings, self.prompt.source)

        # Each turn has a text of its own, which continues its own prompt.
        self._num_cut, self._num_seen = len(ids) - len(fitting), 0
        self._answer = None
        if tokenizer is not None:
            stop = tuple(self._settings.stop or ())
            self._answer = AnswerText(stop, lambda: TextStream(tokenizer, fitting))
        return Request(
            self.prompt.index,
            fitting,
            self._settings.max_new_tokens,
            () if self._settings.ignore_eos else base.eos_token_ids,
            params=self._settings.warping,
            seed=self._settings.seed,
            turn=len(self._turns),
            sources=self._sources(),
            min_new_tokens=self._settings.min_new_tokens,
            logit_bias=self._settings.logit_bias,
        )

    def _sources(self) -> list[Sequence[int]]:
        """Return the texts that drafts may be copied from, beside the row's own."""
        models, prediction = self._models, self.prompt.prediction
        if not models.copies:
            return []
        sources: list[Sequence[int]] = [models.copy_from] if models.copy_from else []
        if prediction is not None and models.tokenizer is not None:
            # An answer is no longer than the context.
            ids = models.tokenizer(prediction, add_special_tokens=False)["input_ids"]
            # The prediction goes before the shared text: what does not fit is cut off at the end.
            sources.insert(0, ids[: models.base.config.max_position_embeddings])
        return sources

    def take(self, progress: RowUpdate) -> TurnProgress:
        """Take in new tokens of the current turn; stop it at a stop string."""
        row = progress.row
        # Streamed text is taken piece by piece, as fine as `watched_by` says.
        pieces, cut = self._watch(row) if self._watched_by else ([], None)
        # Text that is not needed before the end is detokenized at once, in the end.
        if self._answer and not self._watched_by and (self._settings.stop or progress.done):
            cut = self._answer.take(row.output_ids)
        ended = progress.done or cut is not None
        if cut is not None:
            # The engine's result goes on to the end of the chunk, so the turn is a part of it.
            progress.stop()
            turn = _turn(_before(cut, row), cut.text)
        else:
            turn = _turn(row, self._answer.whole() if self._answer and ended else None)

        # The end of an answer settles what was held back.
        if ended:
            self._turns.append(turn)
            if self._watched_by and self._answer:
                pieces.append(Piece(row.target_forwards, [], self._answer.rest(turn.text or "")))
        return TurnProgress(turn, row, pieces, ended, self._num_cut)

    def _watch(self, row: Generation) -> tuple[list[Piece], StopCut | None]:
        """Return what each forward added, up to the one that completes a stop string."""
        pieces: list[Piece] = []
        for forward, ids, is_copied in self._parts(row):
            self._num_seen += len(ids)
            cut = self._answer.take(row.output_ids[: self._num_seen]) if self._answer else None
            # Later groups came in the same chunk; they must not be shown.
            if cut is not None:
                kept = max(cut.num_kept - self._num_seen + len(ids), 0)
                return [*pieces, Piece(forward, ids[:kept], "", is_copied)], cut
            text = self._answer.settled() if self._answer else ""
            is_settled = self._answer is None or self._answer.is_settled
            pieces.append(Piece(forward, ids, text, is_copied, is_settled))
        return pieces, None

    def _parts(self, row: Generation) -> Iterator[tuple[int, list[int], bool]]:
        """Yield what is new of a row: the forward, its tokens, whether they were copied."""
        if self._watched_by == "chunk":
            # The cheapest way: neither the forwards within a chunk nor copies are told apart.
            if ids := row.output_ids[self._num_seen :]:
                yield row.target_forwards, ids, False
            return
        for forward, ids in forward_groups(row, self._num_seen):
            parts = [(ids, False)]
            if self._watched_by == "copy":
                parts = copied_parts(row, forward, ids)
            yield from ((forward, *part) for part in parts)

    def output_row(self) -> dict[str, Any]:
        """Return the finished row's output; with several turns each value is a list."""
        # The keys are those of a single turn, so that readers of rows know one form.
        columns = [dataclasses.asdict(turn) for turn in self._turns]
        if self.prompt.num_turns == 1:
            return {"index": self.prompt.index, **columns[0]}
        joined = {name: [column[name] for column in columns] for name in columns[0]}
        return {"index": self.prompt.index, **joined}


def forward_groups(turn: Generation | Turn, first: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the tokens from number `first` on, by the forward that gave them; prefill is 0.

    Example: ids 5 6 7 8 9 with accepted [2, 4] were given as (0, [5]), (1, [6, 7, 8]) and
    (2, [9]): a limit cut the rest of the last.
    """
    # Prefill gives one token; a forward its accepted ones and the base's own.
    counts = [1, *(accepted + 1 for accepted in turn.accepted)]
    for number, end in enumerate(accumulate(counts)):
        ids = turn.output_ids[max(first, end - counts[number]) : end]
        if ids:
            yield number, ids


def copied_parts(turn: Generation, forward: int, ids: list[int]) -> list[tuple[list[int], bool]]:
    """Return the tokens that a forward gave in parts, each with whether they were copied.

    Copies follow nothing but drafted tokens, and the base's own token comes last.

    Example: ids 5 6 7 8 of a forward that accepted 3 tokens, 2 of them copied, are ([5], False),
    ([6, 7], True) and ([8], False).
    """
    accepted = copied = 0
    if forward and turn.copied:  # prefill copies nothing
        accepted, copied = turn.accepted[forward - 1], turn.copied[forward - 1]
    # Drafted by the head, copied, and the base's own; a limit may have cut any of them.
    parts = [(ids[: accepted - copied], False), (ids[accepted - copied : accepted], True)]
    return [part for part in [*parts, (ids[accepted:], False)] if part[0]]


def forwards_until(accepted: Sequence[int], num_tokens: int) -> int:
    """Return how many forwards it took to emit a number of tokens, prefill's own included.

    Example: accepted [2, 0, 3] emits 1 + 3 + 1 + 4 tokens, so 1 token took 0 forwards, 4 took 1,
    5 took 2 and 6 took 3.
    """
    # `emitted[k]`: tokens of prefill and the first k forwards together.
    emitted = list(accumulate((count + 1 for count in accepted), initial=1))
    return min(bisect_left(emitted, num_tokens), len(accepted))


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


def _before(cut: StopCut, row: Generation) -> Generation:
    """Return the part of a generation before a stop string.

    Forwards beyond it are cut like their tokens, so that tau is 1 for plain decoding.
    """
    return dataclasses.replace(
        row,
        output_ids=row.output_ids[: cut.num_kept],
        accepted=row.accepted[: forwards_until(row.accepted, cut.num_kept)],
        finish_reason="stop",
    )
