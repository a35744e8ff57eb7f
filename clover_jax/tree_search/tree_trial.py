"""Which tree pays, by trial: whole runs in turns with plain decoding, not a sum of parts.

The parts of a step say which trees are worth a trial. What a step costs in the engine's loop, with
its host and its prefill, and what the drafts are worth where steps really begin, only a run says.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clover_jax.config import JsonConfig
from clover_jax.timing.spread import Spread

ROUNDS = 5


class Leg(NamedTuple):
    """What one run emitted, in how many forwards of the base; prefill's own are not counted."""

    tokens: int
    forwards: int


@dataclasses.dataclass(frozen=True)
class Trial(JsonConfig):
    """What a way of decoding gave.

    rates: tokens a second, round by round.
    tau: emitted tokens a forward.
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


def run_in_turns(
    legs: Sequence[Callable[[], Leg]],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Trial]:
    """Run every leg once to compile it, and then all of them in every round.

    Who begins rotates, so that a slow moment does not always hit the same.
    """
    last = [leg() for leg in legs]
    rates: list[list[float]] = [[] for _ in legs]
    for turn in range(rounds):
        for index in [(turn + i) % len(legs) for i in range(len(legs))]:
            started = clock()
            last[index] = legs[index]()
            rates[index].append(last[index].tokens / (clock() - started))
    return [
        Trial(tuple(found), leg.tokens / max(leg.forwards, 1))
        for found, leg in zip(rates, last, strict=True)
    ]


def speed_up(trial: Trial, plain: Trial) -> SpeedUp:
    """Compare round by round, so that what slows a whole round down slows both.

    Example: 30 and 12 tokens a second where plain decoding had 20 and 10: 1.35, 1.2 to 1.5.
    """
    ratios = [a / b for a, b in zip(trial.rates, plain.rates, strict=True)]
    return SpeedUp.of(ratios)


def fastest(speed_ups: Sequence[SpeedUp]) -> int | None:
    """Return which of those that pay has the largest median; None where none pays."""
    paying = [index for index, found in enumerate(speed_ups) if found.pays]
    return max(paying, key=lambda index: speed_ups[index].median, default=None)


def describe(names: Sequence[str], trials: Sequence[Trial], plain: Trial) -> list[str]:
    """Return what was tried, line by line, and what follows from it."""
    found = [speed_up(trial, plain) for trial in trials]
    lines = [f"by trial, in {len(plain.rates)} rounds; {_median(plain):.1f} tokens/s plainly"]
    for name, trial, gain in zip(names, trials, found, strict=True):
        lines.append(f"  {name}: tau {trial.tau:.2f}, {_median(trial):.1f} tokens/s, {gain}")
    best = fastest(found)
    if best is None:
        lines.append("no tree pays, or not in every round: plain decoding")
    else:
        lines.append(f"tree auto: {names[best]}; {found[best]} is expected")
    return lines


def _median(trial: Trial) -> float:
    return statistics.median(trial.rates)
