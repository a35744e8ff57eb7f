"""How rows are decoded: what the command says, and what a row says for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from clover_jax.config import JsonConfig
from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.sampling import SamplingConfig, Warping, check_warping
from clover_jax.errors import UserError
from clover_jax.field_types import check_types

OVERFLOW_POLICIES = ("error", "truncate_left", "skip")
_ROW_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")


@dataclasses.dataclass(frozen=True)
class GenerationSettings(JsonConfig):
    """What holds for a row.

    max_new_tokens: tokens to emit at most, for each turn.
    ignore_eos: go on after an end-of-sequence token.
    context_overflow: what becomes of a prompt that fills the base's context: one of
        OVERFLOW_POLICIES.
    verify: how drafted tokens are accepted, one of VERIFICATIONS; None is greedy where every row is
        at temperature 0, else lossless.
    draft_sampling: how children are chosen, one of DRAFT_SAMPLINGS.
    temperature, top_k, top_p: 0 is greedy; 0 and 1 keep all tokens.
    seed: of a row's own randomness; None derives it from the run's seed and the row's index.
    stop: strings that end the text; a single one may be given as such, and None for none.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False
    context_overflow: str = "error"
    verify: str | None = None
    draft_sampling: str = "topk"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] | None = ()

    def __post_init__(self):
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stop = [] if stop is None else stop
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list) else stop)

        # Types first: what follows compares values.
        check_types(self)
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens ({self.max_new_tokens}) must be at least 1")
        check_warping(self.temperature, self.top_k, self.top_p)
        if self.temperature > 0 and self.verify == "greedy":
            raise UserError(
                f"temperature {self.temperature:g} asks for sampling, which verify=greedy does not "
                "do; use verify=lossless, or temperature 0"
            )

        if self.context_overflow not in OVERFLOW_POLICIES:
            raise UserError(
                f"context_overflow {self.context_overflow!r} is not one of "
                f"{', '.join(OVERFLOW_POLICIES)}"
            )
        if not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop must be strings, not {self.stop!r}")
        if "" in self.stop:
            raise UserError("a stop string is empty; give at least one character")

    @property
    def warping(self) -> Warping:
        """How these settings warp a distribution."""
        return Warping(self.temperature, self.top_k, self.top_p)

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


def sampling_for(
    settings: GenerationSettings, prompts: Iterable[Prompt | BadPrompt]
) -> SamplingConfig:
    """Return what the engine must be able to do for these rows, and no more.

    An engine whose rows are all greedy reduces logits to their argmax; top-k and top-p cost a sort.
    Raises UserError for rules that exclude each other.
    """
    rows = [settings]
    for prompt in prompts:
        try:
            rows.append(settings.for_row(prompt) if isinstance(prompt, Prompt) else settings)
        except UserError:
            continue  # the row fails by itself when its turn comes

    # Greedy verification reads no distribution, so one row that draws decides for all.
    draws = settings.draft_sampling == "sampled" or any(row.temperature > 0 for row in rows)
    try:
        return SamplingConfig(
            verify=settings.verify or ("lossless" if draws else "greedy"),
            draft_sampling=settings.draft_sampling,
            truncate=any(row.top_k > 0 or row.top_p < 1 for row in rows),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
