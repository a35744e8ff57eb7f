"""The engine's input and output: requests, new tokens, generations and accepted lengths."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from clover_jax.config import BaseConfig
from clover_jax.decoding.sampling_config import (
    GREEDY,
    SamplingConfig,
    SamplingParams,
    check_bias,
    check_seed,
)
from clover_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to decode.

    index: the caller's number for it. max_new_tokens: tokens to emit at most, including the one
    from prefill. eos_ids: tokens that end the text (emitted too).
    seed: of the row's key; None derives it from the engine's seed and `index`.
    turn: number of the answer in its conversation; each has a key of its own, since a later turn
        may draw at positions of an earlier one, whose context was cut or rewritten.
    sources: other texts that the answer may repeat, as token ids; they change no text.
    min_new_tokens: tokens to emit before an EOS token may be chosen.
    logit_bias: (token id, what is added to the base's logit of it) of some tokens.
    form: what the text must match, as `grammars.form_text` returns it.
    wants_scores: whether each output token's log-probability is wanted, with the scores of the most
        probable tokens at its place. wants_prompt_scores: the prompt's too.
    shares_prompt: whether the whole of a prompt that another slot holds is taken from there, but
        for its last token, which gives the first new one. (Otherwise whole chunks are taken, so
        that rounding is that of a prompt read alone.)
    """

    index: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int | None = None
    turn: int = 0
    sources: Sequence[Sequence[int]] = ()
    wants_scores: bool = False
    wants_prompt_scores: bool = False
    shares_prompt: bool = False
    min_new_tokens: int = 0
    logit_bias: Sequence[tuple[int, float]] = ()
    form: str | None = None

    @property
    def is_biased(self) -> bool:
        return self.min_new_tokens > 0 or len(self.logit_bias) > 0

    @property
    def is_scored(self) -> bool:
        return self.wants_scores or self.wants_prompt_scores


class TokenScore(NamedTuple):
    """The base's log-probability of a token of the text, before temperature.

    log_probability: of the token itself. at_temperature: the same at the row's temperature.
    top_ids, top_log_probabilities: the most probable tokens at its place, best first.
    """

    log_probability: float
    at_temperature: float
    top_ids: list[int]
    top_log_probabilities: list[float]


@dataclasses.dataclass(kw_only=True)
class Figures:
    """What is known of tokens of a row beyond the tokens themselves.

    accepted: drafted tokens accepted at each target forward, before EOS or the limit cut them.
    proposed: drafted tokens verified at each.
    ranks: of each accepted token, forward by forward, how many of its siblings come before it.
    copied: accepted tokens that were copies of the text, at each; empty without copies.
    seconds: from the start of the row's prefill to the last of these tokens.
    finish_reason: "eos", "length", "stop" or "error"; None while the row runs.
    error: why a row cannot go on.
    scores: of each output token, if they were wanted.
    prompt_scores: of each prompt token but the first, which nothing predicts.
    num_cached: prompt tokens that were not read, since a slot held them.
    """

    accepted: list[int] = dataclasses.field(default_factory=list)
    proposed: list[int] = dataclasses.field(default_factory=list)
    ranks: list[list[int]] = dataclasses.field(default_factory=list)
    copied: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)
    num_cached: int = 0


@dataclasses.dataclass
class NewTokens(Figures):
    """New tokens of a slot, from a chunk of steps; `prompt_scores` and `num_cached` at first."""

    slot: int
    ids: list[int]

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class Generation(Figures):
    """A decoded prompt."""

    index: int
    prompt_ids: list[int]
    output_ids: list[int] = dataclasses.field(default_factory=list)

    def add(self, new: NewTokens) -> None:
        # In place, since callers hold this object and watch it grow.
        self.output_ids += new.ids
        for name in ("accepted", "proposed", "ranks", "copied", "scores", "prompt_scores"):
            getattr(self, name).extend(getattr(new, name))
        self.num_cached += new.num_cached
        self.seconds, self.finish_reason = new.seconds, new.finish_reason
        self.error = new.error

    @property
    def target_forwards(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float | None:
        """Emitted tokens per target forward; None when prefill's own token was the only one."""
        # The first token comes from prefill, not from a verifying forward.
        return (len(self.output_ids) - 1) / len(self.accepted) if self.accepted else None


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """New tokens of one row after a chunk of steps, perhaps none; `row` is complete if done."""

    row: Generation
    new_ids: list[int]
    done: bool

    def stop(self) -> None:
        """End this row early; call it before the next update is taken from the stream.

        Its slot is free for the next request; the row gets no further update.
        """
        # A row that has ended in this very chunk keeps its own reason.
        self.row.finish_reason = self.row.finish_reason or "stop"


class AcceptedLengths:
    """The tally of accepted lengths: tau, hit rates and the histogram of many forwards.

    A forward is each time the base verified a draft; it accepts a number of drafted tokens and
    emits one more of its own, the bonus. An answer's end cuts emitted tokens, not accepted ones:

        tau = emitted tokens / forwards, after the cut, without prefill's own token and forward;
        joint hit rate of position i = forwards that accepted positions 0..i / forwards, before the
            cut;
        conditional hit rate of position i = the same among the forwards that accepted 0..i-1.

    tokens: emitted ones, EOS and prefill's own included. forwards: of the base, after prefill.
    """

    def __init__(self):
        self.tokens = self.forwards = 0
        self._tokens_of_forwards = 0
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, num_tokens: int, accepted: Sequence[int]) -> None:
        """Count an answer: its emitted tokens, and the drafted tokens accepted by each forward."""
        self.tokens += num_tokens
        self._tokens_of_forwards += max(num_tokens - 1, 0)  # the first is prefill's
        self.forwards += len(accepted)
        self._counts.update(accepted)

    @property
    def tau(self) -> float | None:
        """Emitted tokens per forward; None before the first forward."""
        return self._tokens_of_forwards / self.forwards if self.forwards else None

    def histogram(self, depth: int | None = None) -> list[int]:
        """Return at [k] how many forwards accepted k tokens, up to `depth` or to the longest."""
        # -1 without any forward, so that the list is empty.
        longest = max(self._counts, default=-1) if depth is None else depth
        return [self._counts[k] for k in range(longest + 1)]

    def reaching(self, depth: int) -> list[int]:
        """Return at [i] how many forwards accepted positions 0..i, for the positions of a tree."""
        # k accepted tokens stand at positions 0 .. k - 1.
        return [sum(n for k, n in self._counts.items() if k > i) for i in range(depth)]

    def hit_rate(self, depth: int) -> list[float]:
        """Return the joint hit rates; none before the first forward."""
        return [hits / self.forwards for hits in self.reaching(depth) if self.forwards]

    def conditional_hit_rate(self, depth: int) -> list[float | None]:
        """Return the conditional hit rates; None where no forward came that far."""
        # Every forward comes as far as position 0; later ones need the position before them.
        reached = [self.forwards, *self.reaching(depth)]
        return [hits / before if before else None for before, hits in itertools.pairwise(reached)]


def least_sampling(most: SamplingConfig, requests: Iterable[Request]) -> SamplingConfig:
    """Return the cheapest rules, within `most`, that decode these requests."""
    requests = list(requests)
    # Rules for all rows next to those that must match a form: these compile more than others.
    if any(request.form is not None for request in requests):
        return dataclasses.replace(most, scored=True)
    most = dataclasses.replace(most, masked=False)
    # Scores, biases and penalties are rare, so all rows with any of them share few programs.
    penalized = any(request.params.penalizes for request in requests)
    biased = any(request.is_biased for request in requests) or (penalized and most.biased)
    if biased or penalized or any(request.is_scored for request in requests):
        return dataclasses.replace(most, scored=True, biased=biased, penalized=penalized)
    # Greedy verification reduces logits to their argmax; top-k and top-p sort them.
    if all(request.params.temperature == 0 for request in requests):
        return GREEDY
    truncate = any(request.params.cuts for request in requests)
    return dataclasses.replace(most, truncate=truncate, biased=False, penalized=False)


def requests_of_every_kind(length: int) -> list[Request]:
    """Return a request for each set of rules that `least_sampling` may return.

    length: of the prompts.
    """
    # Two new tokens: prefill gives the first, a step the second.
    plain = Request(0, [0] * length, 2)
    drawn = dataclasses.replace(plain, params=SamplingParams(temperature=1.0))
    cut = dataclasses.replace(plain, params=SamplingParams(temperature=1.0, top_p=0.5))
    scored = dataclasses.replace(plain, wants_scores=True)
    biased = dataclasses.replace(plain, min_new_tokens=1)
    penalized = dataclasses.replace(plain, params=SamplingParams(repetition_penalty=1.1))
    return [plain, drawn, cut, scored, biased, penalized]


def check_request(request: Request, base: BaseConfig, rules: SamplingConfig, max_eos: int) -> None:
    """Raise UserError for a request that cannot be decoded by this base, in this way.

    max_eos: EOS tokens that there is room for.
    """
    context, vocabulary = base.max_position_embeddings, base.vocab_size
    # The prompt must be there, leave room for a token, and hold ids of the vocabulary.
    if not request.prompt_ids:
        raise UserError("the prompt has no tokens; give at least one")
    if len(request.prompt_ids) >= context:
        raise UserError(
            f"the prompt has {len(request.prompt_ids)} tokens and the base's context is "
            f"{context}: shorten it, or use --context_overflow=truncate_left"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise UserError(f"prompt ids must lie in 0 .. {vocabulary - 1}")

    # What may end the text must fit the compiled shapes.
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens ({request.max_new_tokens}) must be at least 1")
    if len(request.eos_ids) > max_eos:
        raise UserError(f"{len(request.eos_ids)} EOS tokens; at most {max_eos} fit")

    if request.seed is not None:
        check_seed(request.seed)
    # The compiled step has one rule: a row cannot ask for more than it does.
    params = request.params
    if params.temperature > 0 and rules.verify == "greedy":
        raise UserError(
            f"temperature {params.temperature} needs --verify=lossless or typical; greedy "
            "verification takes the most probable token"
        )
    if params.cuts and not rules.truncate:
        raise UserError("top_k and top_p need an engine with SamplingConfig(truncate=True)")
    if request.is_biased and not rules.biased:
        raise UserError(
            "min_new_tokens and logit_bias need an engine with SamplingConfig(biased=True)"
        )
    if params.penalizes and not rules.penalized:
        raise UserError("penalties and min_p need an engine with SamplingConfig(penalized=True)")
    check_bias(request.logit_bias, vocabulary)
    if request.form is not None:
        if not rules.masked:
            raise UserError("structured_outputs need an engine with SamplingConfig(masked=True)")
        if request.min_new_tokens > 0 or not set(base.eos_token_ids) <= set(request.eos_ids):
            raise UserError(
                "structured_outputs end where their form does: leave out ignore_eos, and the least "
                "number of tokens"
            )
