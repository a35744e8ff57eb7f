"""One prompt row: its turns, one request after the other, and the text of their answers."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from clover_jax.config import BaseConfig
from clover_jax.data.chat import encode_prompt
from clover_jax.data.detokenization import INCOMPLETE, TextStream, settled_length, special_ids
from clover_jax.data.prompts import Prompt
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import Generation, Request, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings, Grain
from clover_jax.errors import UserError

OpenStream = Callable[[], TextStream]  # opens the text of an answer at its first token


class StopCut(NamedTuple):
    """Where a stop string ends a text.

    num_kept: tokens whose whole text lies before the stop string. text: the text before it. Where
        the stop string is part of the text: tokens and text up to its end.
    """

    num_kept: int
    text: str


class AnswerText:
    """The text of one answer, detokenized while its tokens arrive.

    `take` finds stop strings as `find_stop` does; `settled` returns the new text.
    """

    def __init__(self, stops: Sequence[str], open_pieces: OpenStream, keeps_stop: bool = False):
        """Begin a text; `open_pieces` returns a stream that starts at its first token.

        keeps_stop: whether the stop string is part of the text.
        """
        self._stops, self._open, self._keeps_stop = stops, open_pieces, keeps_stop
        self._pieces = open_pieces()
        # A stop string may begin in one piece and end in the next.
        self._overlap = max(map(len, stops), default=1) - 1
        self._text = ""
        # Tokens without a stop string in their text, and characters that `rest` has returned.
        self._num_tokens = self._num_handed_out = 0

    def take(self, ids: Sequence[int]) -> StopCut | None:
        """Take in all tokens so far; return where a stop string ends their text, if one does."""
        new = ids[self._num_tokens :]
        # Token by token if a later one may change the text of earlier ones, else all at once.
        is_fragile = self._stops and self._pieces.holds_back(new)
        for part in [[id_] for id_ in new] if is_fragile else [new]:
            # Only the end can contain a new stop string.
            recent = max(len(self._text) - self._overlap, 0)
            self._text += self._pieces.push(part)
            text = _readable(self._text[recent:], self._pieces) if self._stops else ""
            if _first(text, self._stops) is not None:
                # The token that completes it decides the cut.
                return find_stop(self._open, ids, self._stops, self._num_tokens, self._keeps_stop)
        self._num_tokens = len(ids)
        return None

    def settled(self) -> str:
        """Return the new text that neither later tokens nor stop strings can change."""
        return self.rest(self._text[: settled_length(self._text, self._stops)])

    @property
    def is_settled(self) -> bool:
        """Whether no later stop string can begin in the text so far."""
        if not self._stops:
            return True
        return self._num_handed_out == len(self._text) and not self._pieces.held()

    def rest(self, text: str) -> str:
        """Return the part of this text, which a stop string may have cut, that is new."""
        piece = text[self._num_handed_out :]
        self._num_handed_out += len(piece)
        return piece

    def whole(self) -> str:
        return self._text + self._pieces.held()


def find_stop(
    open_pieces: OpenStream,
    ids: Sequence[int],
    stops: Sequence[str],
    num_clean: int = 0,
    keeps_stop: bool = False,
) -> StopCut | None:
    """Return where the first stop string ends the text of `ids`, if there is one.

    The first is the one that the fewest tokens complete, and of several the leftmost, so the result
    does not depend on how many tokens arrive at a time. A replacement character at the end counts
    only with the token after it: it may be the beginning of another character.

    num_clean: this many first tokens are known to contain no stop string.
    keeps_stop: whether the stop string is part of the text.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    pieces = open_pieces()
    # Clean tokens at once, then one at a time to find the first that completes a stop string.
    settled = pieces.push(ids[:num_clean])
    for num_seen in range(num_clean + 1, len(ids) + 1):
        settled += pieces.push(ids[num_seen - 1 : num_seen])
        text = _readable(settled, pieces)
        found = _first(text, stops)
        if found is not None:
            if keeps_stop:
                return StopCut(num_seen, text[: found.stop])
            start = found.start
            return StopCut(_num_before(open_pieces, ids[:num_seen], start), text[:start])
    return None


def _readable(settled: str, pieces: TextStream) -> str:
    """Return a text with its held-back end, except for a character that may lack bytes."""
    return settled + pieces.held().rstrip(INCOMPLETE)


def _num_before(open_pieces: OpenStream, ids: Sequence[int], position: int) -> int:
    """Return how many tokens have a text that ends at `position` or before."""

    def length(count: int) -> int:
        # From the start each time, since fewer tokens may change a held-back character.
        pieces = open_pieces()
        return len(pieces.push(ids[:count]) + pieces.held())

    # A stop string is short: the cut is near.
    return next((count for count in reversed(range(len(ids))) if length(count) <= position), 0)


def _first(text: str, stops: Sequence[str]) -> range | None:
    """Return where the leftmost stop string lies, the shortest of several."""
    found = ((start, len(stop)) for stop in stops if (start := text.find(stop)) >= 0)
    start, length = min(found, default=(0, 0))
    return range(start, start + length) if length else None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer, with the keys of an output row in their order.

    text, finish_reason: None until the answer is complete; text is None without a tokenizer too.
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
    """A piece of an answer: the tokens of a chunk, of a forward pass, or of a part of one.

    forward: number of the forward pass, 0 for prefill; the last one of a chunk. ids: the tokens.
    text: the new text that can no longer change; "" without a tokenizer.
    is_copied: whether the tokens were copied from the text; False if that is not tracked.
    is_settled: whether no later stop string can remove any of the tokens so far.
    """

    forward: int
    ids: list[int]
    text: str
    is_copied: bool = False
    is_settled: bool = True


@dataclasses.dataclass(frozen=True)
class TurnProgress:
    """The progress of a row's current turn.

    turn: the answer so far, or all of it when `ended`, cut at a stop string.
    generation: the engine's result, with drafted tokens, and with tokens beyond a stop string.
    pieces: the new tokens and text, if the row is watched.
    num_cut: tokens of the turn's prompt that did not fit into the context.
    """

    turn: Turn
    generation: Generation
    pieces: list[Piece]
    ended: bool
    num_cut: int


class Skipped(Exception):
    """A row that is left out at the user's request, with the reason."""


class ContextOverflow(UserError):
    """A prompt of `num_tokens` tokens leaves no room in the context."""

    def __init__(self, message: str, num_tokens: int):
        super().__init__(message)
        self.num_tokens = num_tokens


def fit_context(
    ids: list[int], base: BaseConfig, settings: GenerationSettings, source: str
) -> list[int]:
    """Return a prompt that leaves room for a token: `ids` itself, or its end.

    A truncated prompt leaves room for max_new_tokens, but fills at least half of the context, and
    keeps a beginning-of-sequence token. Raises ContextOverflow or Skipped, as the settings ask.
    """
    context = base.max_position_embeddings
    if len(ids) < context:
        return ids
    too_long = f"{source}: the prompt has {len(ids)} tokens and the base's context is {context}"
    if settings.context_overflow == "error":
        raise ContextOverflow(
            f"{too_long}; shorten it, or give --context_overflow=truncate_left, or =skip", len(ids)
        )
    if settings.context_overflow == "skip":
        raise Skipped(too_long)
    # At least half of the context stays for the question.
    room = max(context - settings.max_new_tokens, context // 2)
    first = ids[:1] if ids[0] == base.bos_token_id else []
    return first + ids[len(ids) - room + len(first) :]


class RowState:
    """A row that is being decoded: its answers so far, and the text of the current one."""

    def __init__(
        self,
        prompt: Prompt,
        settings: GenerationSettings,
        models: Models,
        watched_by: Grain | None = None,
        shown: Sequence[str] = (),
    ):
        """Take the row; raises UserError for settings that it cannot have.

        watched_by: the unit of a piece of streamed text: a chunk of steps, a forward pass, or the
            copies within a forward pass, the cheapest first. None: text at the end only.
        shown: special tokens that have a text, as the vocabulary writes them.
        """
        self.prompt = prompt
        self._settings = settings.for_row(prompt)
        self._models, self._watched_by = models, watched_by
        self._turns: list[Turn] = []
        self._stop_ids = self._settings.stop_token_ids
        self._end_ids: frozenset[int] = frozenset()  # tokens whose text the answer leaves out
        self._shown: frozenset[int] = frozenset()
        if models.tokenizer is not None:
            added, special = models.tokenizer.get_added_vocab(), special_ids(models.tokenizer)
            ids = [added[text] for text in self._settings.stop or () if text in added]
            self._stop_ids = tuple(dict.fromkeys((*self._stop_ids, *ids)))
            # A stop that is a special token has a text where stops have one.
            kept = ids if self._settings.include_stop_str_in_output else []
            kept += [added[text] for text in shown if text in added]
            self._shown = special
            if self._settings.skip_special_tokens:
                self._shown = special.intersection(kept)
        if self._settings.stop and models.tokenizer is None:
            raise UserError(
                f"{prompt.source}: stop strings need the base's tokenizer files, which are "
                "missing; leave stop out"
            )

    def next_request(self) -> Request:
        """Return what to decode for the next turn.

        Raises UserError or Skipped when the turn cannot be decoded, naming the row.
        """
        base, tokenizer = self._models.base.config, self._models.tokenizer
        # Text instead of ids, since a template may rewrite earlier answers.
        answers = [turn.text or "" for turn in self._turns]
        ids = encode_prompt(self.prompt, tokenizer, base.vocab_size, answers)
        fitting = fit_context(ids, base, self._settings, self.prompt.source)

        # The text of each turn continues the turn's own prompt.
        self._num_cut, self._num_seen = len(ids) - len(fitting), 0
        self._answer = None
        ends = (*(() if self._settings.ignore_eos else base.eos_token_ids), *self._stop_ids)
        keeps_stop = self._settings.include_stop_str_in_output
        self._end_ids = frozenset(() if keeps_stop else ends)
        if tokenizer is not None:
            stop, shown = tuple(self._settings.stop or ()), self._shown
            open_pieces = functools.partial(TextStream, tokenizer, fitting, shown)
            self._answer = AnswerText(stop, open_pieces, keeps_stop)
        return Request(
            self.prompt.index,
            fitting,
            self._settings.max_new_tokens,
            ends,
            params=self._settings.warping,
            seed=self._settings.seed,
            turn=len(self._turns),
            sources=self._sources(),
            min_new_tokens=self._settings.min_new_tokens,
            logit_bias=self._settings.logit_bias,
            form=self._settings.structured_outputs,
        )

    def _sources(self) -> list[Sequence[int]]:
        """Return the texts, other than the row's own, that drafts may be copied from."""
        models, prediction = self._models, self.prompt.prediction
        if not models.copies:
            return []
        sources: list[Sequence[int]] = [models.copy_from] if models.copy_from else []
        if prediction is not None and models.tokenizer is not None:
            # An answer is as long as the context at most.
            ids = models.tokenizer(prediction, add_special_tokens=False)["input_ids"]
            # First, since a text that does not fit is cut off at the end.
            sources.insert(0, ids[: models.base.config.max_position_embeddings])
        return sources

    def take(self, progress: RowUpdate) -> TurnProgress:
        """Take in new tokens of the current turn; stop it at a stop string.

        Raises UserError, naming the row, where it cannot go on.
        """
        row = progress.row
        if row.error is not None:
            raise UserError(f"{self.prompt.source}: structured_outputs: {row.error}")
        pieces, cut = self._watch(row) if self._watched_by else ([], None)
        # Otherwise the text is detokenized at once, at the end.
        if self._answer and not self._watched_by and (self._settings.stop or progress.done):
            cut = self._answer.take(self._with_text(row.output_ids))
        ended = progress.done or cut is not None
        kept, text = row, self._answer.whole() if self._answer and ended else None
        if cut is not None:
            # The engine's result continues to the end of the chunk. Forward passes after the stop
            # string are dropped with their tokens, so that tau is 1 for plain decoding.
            progress.stop()
            accepted = row.accepted[: forwards_until(row.accepted, cut.num_kept)]
            ids, text = row.output_ids[: cut.num_kept], cut.text
            kept = dataclasses.replace(row, output_ids=ids, accepted=accepted, finish_reason="stop")
        elif row.finish_reason == "eos" and row.output_ids[-1] in self._stop_ids:
            kept = dataclasses.replace(row, finish_reason="stop")
        turn = Turn(
            prompt_ids=kept.prompt_ids,
            output_ids=kept.output_ids,
            text=text,
            accepted=kept.accepted,
            target_forwards=kept.target_forwards,
            tau=kept.tau,
            seconds=round(kept.seconds, 6),
            finish_reason=kept.finish_reason,
        )

        # The end of an answer completes text that was held back.
        if ended:
            self._turns.append(turn)
            if self._watched_by and self._answer:
                pieces.append(Piece(row.target_forwards, [], self._answer.rest(turn.text or "")))
        return TurnProgress(turn, row, pieces, ended, self._num_cut)

    def _with_text(self, ids: list[int]) -> list[int]:
        """Return the tokens of an answer without the one that has ended it."""
        return ids[:-1] if ids and ids[-1] in self._end_ids else ids

    def _watch(self, row: Generation) -> tuple[list[Piece], StopCut | None]:
        """Return the new pieces, up to the one that completes a stop string."""
        pieces: list[Piece] = []
        for forward, ids, is_copied in self._parts(row):
            self._num_seen += len(ids)
            seen = self._with_text(row.output_ids[: self._num_seen])
            cut = self._answer.take(seen) if self._answer else None
            # Later pieces of the same chunk must not be shown.
            if cut is not None:
                kept = max(cut.num_kept - self._num_seen + len(ids), 0)
                return [*pieces, Piece(forward, ids[:kept], "", is_copied)], cut
            text = self._answer.settled() if self._answer else ""
            is_settled = self._answer is None or self._answer.is_settled
            pieces.append(Piece(forward, ids, text, is_copied, is_settled))
        return pieces, None

    def _parts(self, row: Generation) -> Iterator[tuple[int, list[int], bool]]:
        """Yield the new parts of a row: the forward, its tokens, whether they were copied."""
        if self._watched_by == "chunk":
            if ids := row.output_ids[self._num_seen :]:
                yield row.target_forwards, ids, False
            return
        by_copy = self._watched_by == "copy"
        for forward, ids in forward_groups(row, self._num_seen):
            parts = copied_parts(row, forward, ids) if by_copy else [(ids, False)]
            yield from ((forward, *part) for part in parts)

    def output_row(self) -> dict[str, Any] | None:
        """Return the output row; None until every turn has its answer."""
        if len(self._turns) < self.prompt.num_turns:
            return None
        turns = [dataclasses.asdict(turn) for turn in self._turns]
        row = turns[0]
        # Of a row with several turns each value is a list.
        if len(turns) > 1:
            row = {name: [turn[name] for turn in turns] for name in row}
        return {"index": self.prompt.index, **row}


def forward_groups(turn: Generation | Turn, first: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the tokens from number `first` on by forward pass; prefill is 0.

    Example: ids 5 6 7 8 9 with accepted [2, 4] are (0, [5]), (1, [6, 7, 8]), (2, [9]): a limit cut.
    """
    # Prefill emits one token; a forward pass its accepted ones and the base's own.
    counts = [1, *(accepted + 1 for accepted in turn.accepted)]
    for number, end in enumerate(accumulate(counts)):
        ids = turn.output_ids[max(first, end - counts[number]) : end]
        if ids:
            yield number, ids


def copied_parts(turn: Generation, forward: int, ids: list[int]) -> list[tuple[list[int], bool]]:
    """Return the tokens of a forward pass in parts, each with whether they were copied.

    Example: ids 5 6 7 8 of a forward pass that accepted 3 tokens, 2 of them copied, are
    ([5], False), ([6, 7], True) and ([8], False).
    """
    accepted = copied = 0
    if forward and turn.copied:  # prefill copies nothing
        accepted, copied = turn.accepted[forward - 1], turn.copied[forward - 1]
    # Tokens of the head, copies, then the base's own token; a limit may have cut any of them.
    parts = [(ids[: accepted - copied], False), (ids[accepted - copied : accepted], True)]
    return [part for part in [*parts, (ids[accepted:], False)] if part[0]]


def forwards_until(accepted: Sequence[int], num_tokens: int) -> int:
    """Return how many forward passes it took to emit a number of tokens, with prefill's token.

    Example: accepted [2, 0, 3] emits 1 + 3 + 1 + 4 tokens, so 1 token took 0 passes, 4 took 1,
    5 took 2 and 6 took 3.
    """
    # emitted[k]: tokens of prefill and the first k passes together.
    emitted = list(accumulate((count + 1 for count in accepted), initial=1))
    return min(bisect_left(emitted, num_tokens), len(accepted))
