"""Requests to the scheduler (asks), and its refusals; nothing here imports JAX."""

from __future__ import annotations

import dataclasses
from http import HTTPStatus

from clover_jax.data.prompts import Prompt
from clover_jax.decoding.row_settings import GenerationSettings, Grain
from clover_jax.serving.body import ApiError

_RETRY = {"Retry-After": "5"}  # seconds until a full queue may have room


@dataclasses.dataclass(frozen=True)
class Ask:
    """One choice of one API request: what takes one slot.

    A body becomes a Call (`requests.py`), which has an Ask for each choice; the scheduler puts each
    into a slot as a Request of the engine.

    client: the queue is round-robin over clients.
    choice: number of the choice of `n`; each has its own random key.
    watched_by: the parts in which text is streamed, as in `RowState`.
    top_logprobs: alternatives to each token of the answer; None for no log-probabilities at all.
    prompt_logprobs: whether the prompt's tokens are scored too.
    must_fit: whether the context must have room for all tokens of the settings; else for one.
    """

    prompt: Prompt
    settings: GenerationSettings
    client: str = ""
    choice: int = 0
    watched_by: Grain | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    must_fit: bool = False

    def check_room(self, num_tokens: int, context: int) -> None:
        """Raise ApiError where a prompt of `num_tokens` tokens leaves too little of the context."""
        # A limit that the client gave must fit; a default means as many as there is room for.
        max_tokens = self.settings.max_new_tokens if self.must_fit else 1
        if num_tokens + max_tokens <= context:
            return
        # A shorter answer helps only where the prompt by itself leaves room.
        if num_tokens >= context:
            words = f"and the context is {context}, answer included; give {context - 1} or fewer"
        else:
            words = (
                f"and max_tokens ({max_tokens}) exceed the context of {context}; ask for "
                f"{context - num_tokens} or fewer, or shorten the prompt"
            )
        source = self.prompt.source
        raise ApiError(
            f"{source}: {num_tokens} tokens {words}", param=source, code="context_length_exceeded"
        )


class Overloaded(ApiError):
    """The queue is full."""

    def __init__(self):
        super().__init__(
            "too many requests are waiting; try again later",
            HTTPStatus.TOO_MANY_REQUESTS,
            code="rate_limit_exceeded",
            headers=_RETRY,
        )


class TimeLimit(ApiError):
    """A request took longer than it may."""

    def __init__(self):
        # Clients would try again, and wait as long for the same.
        super().__init__(
            "the answer took longer than the server allows; ask for fewer tokens",
            HTTPStatus.GATEWAY_TIMEOUT,
            headers={"x-should-retry": "false"},
        )
