"""Choose a tree by a trial: whole runs that alternate with plain decoding, not a sum of parts.

The parts of a step choose the trees to try. Only a run includes the cost of the host and of
prefill, and the acceptance at the positions where steps really begin.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clover_jax.config import JsonConfig
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.loading.models import Models
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.timing.turns import Spread

ROUNDS = 5
LEAST_PROMPTS = 5  # with fewer different ones the result does not carry over to others

Prompts = Sequence[Sequence[int]]


class Decoded(NamedTuple):
    """Tokens and forwards of the base in one timed pass; prefill is not counted."""

    tokens: int
    forwards: int


@dataclasses.dataclass(frozen=True)
class Trial(JsonConfig):
    """The rates of one way of decoding.

    rates: tokens a second, round by round.
    tau: emitted tokens a forward, over all rounds.
    """

    rates: tuple[float, ...]
    tau: float


class SpeedUp(Spread):
    """Tokens a second over those of plain decoding in the same round."""

    @property
    def pays(self) -> bool:
        """Whether it was faster in every round: a gain within the spread is none."""
        return self.least > 1

    def __str__(self) -> str:
        return f"{self.median:.2f} x plain decoding ({self.least:.2f} to {self.most:.2f})"


def share_out(prompts: Prompts, rows: int, rounds: int = ROUNDS) -> list[Prompts]:
    """Return the prompts of each round, `rows` of them.

    Every round begins after the last prompt of the one before, so the rounds differ by their
    prompts wherever there are more than a round takes.

    Example: prompts a to e in 3 rounds of 2 rows are ab, cd and ea.
    """
    return [
        [prompts[(turn * rows + row) % len(prompts)] for row in range(rows)]
        for turn in range(rounds)
    ]


def measure_trials(
    ways: Sequence[Models],
    rounds: Sequence[Prompts],
    new_tokens: int,
    sampling: SamplingConfig,
    warping: SamplingParams,
    batch_size: int,
) -> list[Trial]:
    """Decode each round's prompts in every way, alternating; every row emits `new_tokens`."""
    # The same requests in every way, a list for each round.
    options = warping.to_dict()
    requests = [
        [Request(index, prompt, new_tokens, **options) for index, prompt in enumerate(prompts)]
        for prompts in rounds
    ]

    def decode(models: Models, turn: int) -> Decoded:
        # A slot without a row would cost as much as one with a row.
        engine = models.engine(min(batch_size, len(requests[turn])), sampling)
        tokens = forwards = 0
        for progress in engine.stream(models.base.params, models.draft_params, requests[turn]):
            if progress.done:
                # The first token is prefill's, whose forward is not counted either.
                tokens += len(progress.row.output_ids) - 1
                forwards += progress.row.target_forwards
        return Decoded(tokens, forwards)

    passes = [functools.partial(decode, models) for models in ways]
    with CompileClock() as compiling:
        # A longer prompt may need a program that no round before it needed.
        return run_in_turns(passes, len(rounds), compiling.now)


def run_in_turns(
    passes: Sequence[Callable[[int], Decoded]], rounds: int, clock: Callable[[], float]
) -> list[Trial]:
    """Run every pass of round 0 once to compile it, and then all of them in every round.

    passes: each is called with the number of its round.
    The first pass rotates, so that a slow moment does not always hit the same one.
    """
    # A later round may compile too; the clock of `measure_trials` leaves that time out.
    for run in passes:
        run(0)

    decoded: list[list[Decoded]] = [[] for _ in passes]
    rates: list[list[float]] = [[] for _ in passes]
    for turn in range(rounds):
        for index in [(turn + i) % len(passes) for i in range(len(passes))]:
            started = clock()
            decoded[index].append(passes[index](turn))
            rates[index].append(decoded[index][-1].tokens / (clock() - started))

    # Prefill gives a row's first token, so rows of one token need no forward.
    taus = [sum(x.tokens for x in way) / max(sum(x.forwards for x in way), 1) for way in decoded]
    return [Trial(tuple(way), tau) for way, tau in zip(rates, taus, strict=True)]


def speed_up(trial: Trial, plain: Trial) -> SpeedUp:
    """Compare round by round, so that a slow round is slow for both.

    Example: 30 and 12 tokens a second where plain decoding had 20 and 10: 1.35, 1.2 to 1.5.
    """
    ratios = [a / b for a, b in zip(trial.rates, plain.rates, strict=True)]
    gain = SpeedUp.of(ratios)
    assert gain is not None  # a trial has rounds
    return gain


def fastest(speed_ups: Sequence[SpeedUp]) -> int | None:
    """Return the one with the largest median of those that pay; None where none does."""
    paying = [index for index, gain in enumerate(speed_ups) if gain.pays]
    return max(paying, key=lambda index: speed_ups[index].median, default=None)


def describe(
    names: Sequence[str], trials: Sequence[Trial], plain: Trial, num_prompts: int
) -> list[str]:
    """Return the trials, line by line, and the choice.

    num_prompts: different prompts over all rounds.
    """
    speed_ups = [speed_up(trial, plain) for trial in trials]
    prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} different prompts"
    lines = [
        f"by trial, in {len(plain.rates)} rounds over {prompts}; "
        f"{statistics.median(plain.rates):.1f} tokens/s plainly"
    ]
    if num_prompts < LEAST_PROMPTS:
        lines.append(
            f"  {prompts} may not stand for others; give {LEAST_PROMPTS} or more with "
            "--calibration=FILE"
        )
    for name, trial, gain in zip(names, trials, speed_ups, strict=True):
        rate = statistics.median(trial.rates)
        lines.append(f"  {name}: tau {trial.tau:.2f}, {rate:.1f} tokens/s, {gain}")

    best = fastest(speed_ups)
    if best is None:
        lines.append("no tree pays, or not in every round: plain decoding")
    else:
        lines.append(f"tree auto: {names[best]}; {speed_ups[best]} is expected")
    return lines
