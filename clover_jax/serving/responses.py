"""Response bodies and streamed chunks in OpenAI's shapes."""

from __future__ import annotations

import abc
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clover_jax.decoding.requests import TokenScore
from clover_jax.decoding.row_state import Piece, TurnProgress
from clover_jax.serving.calls import Part, Splitter
from clover_jax.serving.metrics import FINISH_REASONS, forwards_of
from clover_jax.serving.requests import Call
from clover_jax.serving.token_texts import TokenPlaces, TokenTexts

LEAST_LOGPROB = -9999.0  # JSON has no infinity
_PROMPT_END = 16  # tokens that surely hold a mark of thinking
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return a server-sent event; its JSON is ASCII, since readers split lines at U+2028 too."""
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"


class Scored(NamedTuple):
    """A token with its log-probability and the most probable ones in its place.

    log_probability: None for the first token of a prompt, which nothing predicted.
    """

    id: int
    log_probability: float | None
    top: list[tuple[int, float]]


class Answers(abc.ABC):
    """Forms the bodies of one call; a streamed answer piece by piece."""

    kind: str
    chunk_kind: str
    prefix: str
    nothing: Any  # in the place of new text, where there is none
    done = DONE  # the end of a stream

    def __init__(self, call: Call, model: str, texts: TokenTexts):
        self.call, self._texts = call, texts
        # The same in every chunk of a stream.
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        # Streamed choices that have begun; of each the tokens that came, and those already sent.
        self._begun: set[int] = set()
        self._num_seen = [0] * len(call.asks)
        self._num_told = [0] * len(call.asks)
        self._places: dict[int, TokenPlaces] = {}

    def whole(self, ended: Sequence[TurnProgress]) -> dict[str, Any]:
        """Return the body of all answers, in the order of the asks."""
        choices = []
        for index, progress in enumerate(ended):
            # With echo, prompt and answer are one text with one list of scores.
            scored = self._scored_prompt(index, progress)
            scored += self._scored(progress, 0, progress.turn.output_ids)
            answer = "" if self.call.no_output else progress.turn.text or ""
            logprobs = self._logprobs(index, scored) if self._wants_scores else None
            message = self._message(index, progress, self._prompt_text(index) + answer)
            choices.append(_choice(index, message, logprobs, self._finish(index, progress)))
        return self._body(self.kind, choices) | {"usage": self.usage(ended)}

    def event(self, value: Mapping[str, Any]) -> bytes:
        """Return the event of a chunk, or of an error that ends the stream."""
        return event(value)

    def next(self, index: int, progress: TurnProgress, compile_seconds: float = 0.0) -> list[dict]:
        """Return the chunks of what is new of a choice, its beginning and its end included.

        compile_seconds: how long the request has waited for compilation.
        """
        chunks = [] if index in self._begun else self._first(index, progress)
        self._begun.add(index)
        pieces = [] if self.call.no_output else progress.pieces
        # One piece is of one forward; without `forwards` all of them are joined.
        for piece in pieces if self.call.tells_forwards else _joined(pieces):
            self._num_seen[index] += len(piece.ids)
            scored: list[Scored] = []
            # A stop string may yet take the last tokens away, so their scores wait like their text.
            if piece.is_settled:
                first, end = self._num_told[index], self._num_seen[index]
                scored = self._scored(progress, first, progress.turn.output_ids[first:end])
                self._num_told[index] = end
            new = self._delta(index, progress, piece.text)
            # Nothing to show yet, except to a client that counts tokens by forward.
            if not (any(new.values()) or scored or (piece.ids and self.call.tells_forwards)):
                continue
            choice = self._piece(index, new, scored)
            if self.call.tells_forwards:
                choice["forward"] = {
                    "forward": piece.forward,
                    "num_tokens": len(piece.ids),
                    "num_copied": len(piece.ids) if piece.is_copied else 0,
                    "compile_seconds": compile_seconds,
                }
            chunks.append(self._chunk(choice))
        if progress.ended:
            rest = self._delta(index, progress, None)
            if any(rest.values()):
                chunks.append(self._chunk(self._piece(index, rest, [])))
            none, finish = dict.fromkeys(rest, self.nothing), self._finish(index, progress)
            chunks.append(self._chunk(self._piece(index, none, [], finish)))
        return chunks

    def _first(self, index: int, progress: TurnProgress) -> list[dict[str, Any]]:
        """Return the chunks that a choice begins with, when its first tokens are there."""
        text, scored = self._prompt_text(index), self._scored_prompt(index, progress)
        new = self._delta(index, progress, text)
        return [self._chunk(self._piece(index, new, scored))] if text or scored else []

    def last(self, ended: Sequence[TurnProgress]) -> list[dict[str, Any]]:
        """Return the chunks after the last choice has ended."""
        if not self.call.include_usage:
            return []
        # As in OpenAI's API: a chunk without choices.
        return [self._body(self.chunk_kind, []) | {"usage": self.usage(ended)}]

    def usage(self, ended: Sequence[TurnProgress]) -> dict[str, Any]:
        """Return the tokens that were read and given; a prompt counts once for all its choices."""
        # The choices of a prompt follow one another; the first stands for it.
        prompts = ended[:: self.call.n]
        prompt_tokens = sum(len(progress.turn.prompt_ids) for progress in prompts)
        cached_tokens = sum(progress.generation.num_cached for progress in prompts)
        outputs = [] if self.call.no_output else ended
        completion_tokens = sum(len(progress.turn.output_ids) for progress in outputs)
        accepted, rejected = self._predicted(outputs)

        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def _predicted(self, ended: Sequence[TurnProgress]) -> tuple[int, int]:
        """Return how many tokens of predictions were accepted, and how many were not."""
        accepted = rejected = 0
        # `ended` is empty where no output is wanted, hence not strict.
        for ask, progress in zip(self.call.asks, ended, strict=False):
            if ask.prompt.prediction is None:
                continue
            length = len(self._texts.encode(ask.prompt.prediction, add_special_tokens=False))
            # Copies come from the prompt and the answer too; their source is not recorded.
            copied = min(sum(forward.num_copied for forward in forwards_of(progress)), length)
            accepted, rejected = accepted + copied, rejected + length - copied
        return accepted, rejected

    @property
    def _wants_scores(self) -> bool:
        return self.call.asks[0].top_logprobs is not None

    @property
    def _shows_special(self) -> bool:
        return not self.call.asks[0].settings.skip_special_tokens

    def _finish(self, index: int, progress: TurnProgress) -> str:
        # A limit of 0 tokens has ended the answer, whatever the engine's one token was.
        reason = "length" if self.call.no_output else progress.turn.finish_reason
        assert reason is not None  # an answer that has ended says why
        return FINISH_REASONS[reason]

    def _prompt_text(self, index: int) -> str:
        if not self.call.echo:
            return ""
        prompt = self.call.asks[index].prompt
        if prompt.prompt_ids is None:
            return prompt.text or ""
        return self._texts.decode(prompt.prompt_ids, self._shows_special)

    def _scored_prompt(self, index: int, progress: TurnProgress) -> list[Scored]:
        if not self.call.asks[index].prompt_logprobs:
            return []
        # Scores begin with the second token: nothing predicted the first.
        scores = progress.generation.prompt_scores
        return self._with_scores(progress.turn.prompt_ids, [None, *scores])

    def _scored(self, progress: TurnProgress, first: int, ids: Sequence[int]) -> list[Scored]:
        """Return tokens of an answer, from number `first` on, with their scores if wanted."""
        if not self._wants_scores or self.call.no_output:
            return []
        return self._with_scores(ids, progress.generation.scores[first : first + len(ids)])

    def _with_scores(self, ids: Sequence[int], scores: Sequence[TokenScore | None]) -> list[Scored]:
        # The engine gives as many scores as any request may want; all asks of a call want `most`.
        most = self.call.asks[0].top_logprobs or 0
        scored = []
        for id_, score in zip(ids, scores, strict=True):
            if score is None:
                scored.append(Scored(id_, None, []))
                continue
            values = [max(value, LEAST_LOGPROB) for value in score.top_log_probabilities]
            top = list(zip(score.top_ids, values, strict=True))[:most]
            scored.append(Scored(id_, max(score.log_probability, LEAST_LOGPROB), top))
        return scored

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        # A stream that ends with its usage says null before, as OpenAI's do.
        usage = {"usage": None} if self.call.include_usage else {}
        return self._body(self.chunk_kind, [choice]) | usage

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": kind, **self._head, "choices": choices}

    def _piece(
        self, index: int, new: dict[str, Any], scored: list[Scored], finish: str | None = None
    ) -> dict[str, Any]:
        """Return a choice of a chunk; new: as `_delta` returns it."""
        logprobs = self._logprobs(index, scored) if scored else None
        return _choice(index, new, logprobs, finish)

    @abc.abstractmethod
    def _message(self, index: int, progress: TurnProgress, text: str) -> dict[str, Any]:
        """Return what a choice of a whole body has for its text."""

    @abc.abstractmethod
    def _delta(self, index: int, progress: TurnProgress, text: str | None) -> dict[str, Any]:
        """Return what a choice of a chunk has for more of its text, or for its end (None)."""

    @abc.abstractmethod
    def _logprobs(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        """Return the log-probabilities of a choice's tokens after those sent before."""


class CompletionAnswers(Answers):
    """Bodies of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    nothing = ""

    def _message(self, index: int, progress: TurnProgress, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, index: int, progress: TurnProgress, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        texts, offsets, tops = self._texts, [], []
        # Without the prompt the answer's first token does not begin a text.
        begun = TokenPlaces(texts, self.call.echo, self._shows_special)
        places = self._places.setdefault(index, begun)
        for token in scored:
            offsets.append(places.next(token.id))
            # The token itself is among its alternatives, wherever it ranks.
            top = {} if token.log_probability is None else {token.id: token.log_probability}
            top |= {id_: value for id_, value in token.top if id_ != token.id}
            # Several tokens may read alike: the most probable one stands.
            ranked = sorted(top.items(), key=lambda item: item[1])
            tops.append({texts.text(id_): value for id_, value in ranked} or None)
        return {
            "tokens": [texts.text(token.id) for token in scored],
            "token_logprobs": [token.log_probability for token in scored],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatAnswers(Answers):
    """Bodies of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    nothing: Mapping[str, Any] = {}

    def __init__(self, call: Call, model: str, texts: TokenTexts):
        super().__init__(call, model, texts)
        self._splitters: dict[int, Splitter] = {}  # by choice, where the call has a splitting

    def _first(self, index: int, progress: TurnProgress) -> list[dict[str, Any]]:
        # OpenAI's streams say who speaks before they say anything.
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(_choice(index, delta, None, None))]

    def _message(self, index: int, progress: TurnProgress, text: str) -> dict[str, Any]:
        parts = self._split(index, progress, text) + self._split(index, progress, None)
        new = _delta_of(parts)
        for call in new.get("tool_calls", ()):
            del call["index"]
        # Calls may take the place of a text.
        content = new.pop("content", None if "tool_calls" in new else "")
        return {"message": {"role": "assistant", "content": content, "refusal": None, **new}}

    def _delta(self, index: int, progress: TurnProgress, text: str | None) -> dict[str, Any]:
        return {"delta": _delta_of(self._split(index, progress, text))}

    def _split(self, index: int, progress: TurnProgress, text: str | None) -> list[Part]:
        """Return the parts that more text settles, or the end of the text (None)."""
        splitting = self.call.splitting
        if splitting is None:
            return [Part("content", text)] if text else []
        if index not in self._splitters:
            # The prompt's last tokens tell whether it leaves the answer thinking.
            end = self._texts.decode(progress.turn.prompt_ids[-_PROMPT_END:], shows_special=True)
            self._splitters[index] = splitting.splitter(end)
        splitter = self._splitters[index]
        parts = splitter.end() if text is None else splitter.push(text)
        return [one for one in parts if splitting.shows_thinking or one.kind != "reasoning"]

    def _finish(self, index: int, progress: TurnProgress) -> str:
        reason = super()._finish(index, progress)
        splitter = self._splitters.get(index)
        return "tool_calls" if reason == "stop" and splitter and splitter.num_calls else reason

    def _logprobs(self, index: int, scored: list[Scored]) -> dict[str, Any]:
        content = []
        for token in scored:
            top = [self._token(id_, value) for id_, value in token.top]
            content.append(self._token(token.id, token.log_probability) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id_: int, value: float | None) -> dict[str, Any]:
        texts = self._texts
        return {"token": texts.text(id_), "logprob": value, "bytes": texts.spelled(id_)}


def _choice(
    index: int, text: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish}


def _delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return parts of an answer in the form of OpenAI's delta: {} for none."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind != "call":
            name = "reasoning_content" if part.kind == "reasoning" else "content"
            delta[name] = delta.get(name, "") + part.text
            continue
        # The beginning of a call has its name, its later pieces arguments alone.
        call = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            call["function"] = {"name": part.name, "arguments": ""}
        call["function"]["arguments"] += part.text
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return all pieces as one, none of none."""
    if not pieces:
        return []
    ids = [id_ for piece in pieces for id_ in piece.ids]
    text = "".join(piece.text for piece in pieces)
    return [pieces[-1]._replace(ids=ids, text=text, is_copied=False)]
