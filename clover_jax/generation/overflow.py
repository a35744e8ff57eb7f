"""Prompts that do not fit the base's context: failed, cut or skipped."""

from __future__ import annotations

from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.generation.settings import GenerationSettings


class Skipped(Exception):
    """A row is left out because the user asked for it; the message says why."""


class ContextOverflow(UserError):
    """A prompt of `num_tokens` tokens leaves no room in the context."""

    def __init__(self, message: str, num_tokens: int):
        super().__init__(message)
        self.num_tokens = num_tokens


def fit_context(
    ids: list[int], base: BaseConfig, settings: GenerationSettings, source: str
) -> list[int]:
    """Return a prompt that leaves room for a token: `ids` itself, or its end.

    Truncated on the left it leaves room for max_new_tokens, but keeps at least half of the context,
    and the first token stays where it is the base's beginning-of-sequence token.

    Raises ContextOverflow or Skipped, as settings.context_overflow says.
    """
    # One token more must fit: a prompt that fills the context leaves no room for an answer.
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
    # A long answer must not push the whole question out.
    room = max(context - settings.max_new_tokens, context // 2)
    first = ids[:1] if ids[0] == base.bos_token_id else []
    return first + ids[len(ids) - room + len(first) :]
