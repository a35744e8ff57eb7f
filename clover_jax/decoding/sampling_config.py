"""The rules of a step, the sampling parameters of a row, and their checks.

Nothing here imports JAX: commands define flags from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence

from clover_jax.config import JsonConfig
from clover_jax.errors import UserError
from clover_jax.field_types import declared_settings, setting

VERIFICATIONS = ("greedy", "lossless", "typical")
DRAFT_SAMPLINGS = ("auto", "topk", "sampled")
MOST_BIASED = 300  # tokens whose logits a row may change, OpenAI's limit
LARGEST_TEMPERATURE = (2 - 2**-23) * 2.0**127  # the largest finite float32

_parameter = functools.partial(setting, group="sampling")


@dataclasses.dataclass(frozen=True)
class SamplingConfig(JsonConfig):
    """How drafted tokens are chosen and verified; static in a step.

    verify: "greedy" (temperature 0 only; reduces logits to their argmax), "lossless" (the text is
        distributed as plain sampling's) or "typical" (Medusa's rule: not lossless).
    draft_sampling: "topk" children by probability, or children "sampled" without replacement, which
        accepts more; "auto" is "sampled" where a step can be exact with it (`StepConfig`).
    truncate: whether any row uses top-k or top-p, which cost a sort.
    scored: whether steps report the log-probabilities of what they emit (verify "lossless" only).
    biased: whether any row changes the base's logits (`sampling.RowBias`).
    penalized: whether any row has penalties or min_p (`sampling.RowPenalties`).
    masked: whether any row's text must match a form (`grammars.py`); its steps are split in three.
    typical_epsilon, typical_delta: Medusa's thresholds.
    force_accept: for timing greedy steps only: accept exactly this many drafted tokens.
    """

    verify: str = "greedy"
    draft_sampling: str = "topk"
    truncate: bool = False
    scored: bool = False
    biased: bool = False
    penalized: bool = False
    masked: bool = False
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    force_accept: int | None = None

    def __post_init__(self):
        if self.verify not in VERIFICATIONS:
            raise UserError(f"verify {self.verify!r} is not one of {', '.join(VERIFICATIONS)}")
        if self.draft_sampling not in DRAFT_SAMPLINGS:
            raise UserError(
                f"draft_sampling {self.draft_sampling!r} is not one of {', '.join(DRAFT_SAMPLINGS)}"
            )

        if self.scored and self.verify != "lossless":
            raise UserError(f"scored steps need verify 'lossless', not {self.verify!r}")
        if self.force_accept is not None and not self.needs_choices_only:
            raise UserError(
                f"force_accept times greedy verification of the base's own logits, not "
                f"{self.verify!r}{' with biased rows' if self.biased else ''}"
                f"{' with penalties' if self.penalized else ''}"
                f"{' with masks' if self.masked else ''}"
            )
        if self.draft_sampling == "sampled" and self.verify != "lossless":
            raise UserError(
                f"draft_sampling 'sampled' needs verify 'lossless', not {self.verify!r}, "
                "which does not read the draft's distribution"
            )

    @property
    def needs_choices_only(self) -> bool:
        """Whether the rule reads the base's most probable tokens only, and no other logits."""
        # What changes logits may change which one is the largest, so it needs all of them.
        is_changed = self.biased or self.penalized or self.masked
        return self.verify == "greedy" and not is_changed


GREEDY = SamplingConfig()


@dataclasses.dataclass(frozen=True)
class SamplingParams(JsonConfig):
    """The sampling parameters of a row; raises UserError for values without a distribution.

    Penalties are vLLM's and Hugging Face's: `repetition_penalty` divides the positive logits of the
    tokens of prompt and answer, and multiplies the others; `frequency_penalty` is subtracted for
    each time that the answer has a token, `presence_penalty` once.
    """

    temperature: float = _parameter(0.0, "0 takes the most probable token")
    top_k: int = _parameter(0, "draw from this many tokens at most; 0: from all")
    top_p: float = _parameter(1.0, "draw from the most probable tokens up to this mass", most=1.0)
    min_p: float = _parameter(
        0.0, "draw from tokens that have at least this share of the best one's probability", most=1
    )
    repetition_penalty: float = _parameter(
        1.0, "above 1: tokens of prompt and answer become less probable", least=0.01, most=100
    )
    frequency_penalty: float = _parameter(
        0.0, "subtracted from a token's logit for each time it was generated", least=-2, most=2
    )
    presence_penalty: float = _parameter(
        0.0, "subtracted once from the logit of every token that was generated", least=-2, most=2
    )

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature ({self.temperature}) must be 0 or more")
        if self.temperature > LARGEST_TEMPERATURE:  # it would become infinite on the device
            raise UserError(
                f"temperature ({self.temperature:g}) must be {LARGEST_TEMPERATURE:g} or less"
            )
        if self.top_k < 0:
            raise UserError(f"top_k ({self.top_k}) must be 1 or more, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p ({self.top_p}) must lie in (0, 1]")
        for name in ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            bounds = declared_settings(SamplingParams)[name]
            if not bounds.least <= getattr(self, name) <= bounds.most:
                raise UserError(
                    f"{name} ({getattr(self, name)}) must lie in {bounds.least} .. {bounds.most}"
                )

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p excludes any tokens, which costs a sort."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the text change what follows, or min_p excludes any."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1, 0, 0) or (self.min_p > 0 and self.temperature > 0)


def check_bias(logit_bias: Sequence[tuple[int, float]], vocabulary: int) -> None:
    """Raise UserError for biases of tokens outside the vocabulary, and for infinite ones."""
    if len(logit_bias) > MOST_BIASED:
        raise UserError(
            f"logit_bias: {len(logit_bias)} tokens; at most {MOST_BIASED} may have a bias"
        )
    for id_, bias in logit_bias:
        if not 0 <= id_ < vocabulary:
            raise UserError(f"logit_bias: token ids must lie in 0 .. {vocabulary - 1}, not {id_}")
        if not abs(bias) <= LARGEST_TEMPERATURE:  # the largest float32, and no NaN
            raise UserError(f"logit_bias: {bias} of token {id_} is not finite")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed of more bits than a key has; JAX would drop them."""
    # NumPy's integers are whole numbers too; True is not one.
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise UserError(f"seed must be a whole number, not {seed!r}")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed ({seed}) must lie in 0 .. {2**32 - 1}")
