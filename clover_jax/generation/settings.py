"""How rows are decoded: what the command says, and what a row says for itself."""

from __future__ import annotations

import dataclasses

from clover_jax.config import JsonConfig
from clover_jax.data.prompts import Prompt
from clover_jax.errors import UserError

OVERFLOW_POLICIES = ("error", "truncate_left", "skip")
VERIFIERS = ("greedy", "lossless", "typical")
_ROW_OPTIONS = ("max_new_tokens", "temperature", "stop")


@dataclasses.dataclass(frozen=True)
class GenerationSettings(JsonConfig):
    """What holds for a row.

    max_new_tokens: tokens to emit at most, for each turn.
    ignore_eos: go on after an end-of-sequence token.
    context_overflow: what becomes of a prompt that fills the base's context: one of
        OVERFLOW_POLICIES.
    verify: how drafted tokens are accepted, one of VERIFIERS; greedy for now.
    temperature: 0 for now.
    stop: strings that end the text.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False
    context_overflow: str = "error"
    verify: str = "greedy"
    temperature: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens ({self.max_new_tokens}) must be at least 1")
        if self.temperature > 0:
            raise UserError(
                f"temperature {self.temperature:g} asks for sampling, which is not there yet; "
                "the only temperature is 0, greedy decoding"
            )
        if self.verify != "greedy":
            raise UserError(
                f"verify={self.verify} is for sampling, which is not there yet; use verify=greedy"
            )
        if "" in self.stop:
            raise UserError("a stop string is empty; give at least one character")

    def for_row(self, prompt: Prompt) -> GenerationSettings:
        """Return the settings with the row's own in their place.

        Raises UserError, naming the row, for what cannot be had.
        """
        own = {name: getattr(prompt, name) for name in _ROW_OPTIONS}
        given = {name: value for name, value in own.items() if value is not None}
        try:
            return dataclasses.replace(self, **given)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error
