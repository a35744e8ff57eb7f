"""What the scheduler is asked, and how it refuses; nothing here imports JAX."""

from __future__ import annotations

import dataclasses

from clover_jax.data.prompts import Prompt
from clover_jax.generation.settings import GenerationSettings


@dataclasses.dataclass(frozen=True)
class Ask:
    """One choice of one request.

    client: whose turn it is in the queue, which is fair between clients.
    choice: number of the choice of `n`; each draws by a key of its own.
    is_watched: whether text is wanted as it comes.
    top_logprobs: alternatives to each token of the answer; None for no log-probabilities at all.
    prompt_logprobs: whether the prompt's tokens are scored too.
    """

    prompt: Prompt
    settings: GenerationSettings
    client: str = ""
    choice: int = 0
    is_watched: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False


class Overloaded(Exception):
    """The queue is full; another try makes sense after `retry_after` seconds."""

    def __init__(self, retry_after: int = 1):
        super().__init__("the queue is full")
        self.retry_after = retry_after


class TimeLimit(Exception):
    """A request took longer than it may."""
