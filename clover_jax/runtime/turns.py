"""Time several functions, alternating in one process, so that a slow moment affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

Run = Callable[[], Any]  # one execution; its arrays may still be on their way

ENOUGH = 0.005  # seconds of a turn; a shorter one would time the clock and the dispatch
MOST_CALLS = 64
WARM_UP = 3


def time_in_turns(
    runs: Mapping[str, Run],
    rounds: int,
    single: Collection[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of one call of each.

    WARM_UP calls of every function come first. In each round every function has its turn: calls
    for a few milliseconds, or one if it is named in `single`, and then a wait for their outputs.
    """
    calls = {}
    for name, run in runs.items():
        jax.block_until_ready(run())  # compiles
        # The fastest call decides: after a slow one a turn would get too few calls.
        once = min(_turn(run, 1, clock) for _ in range(WARM_UP - 1))
        # Each call in `single`, such as the engine's, moves on in the text: one a turn, no more.
        most = 1 if name in single else MOST_CALLS
        calls[name] = max(1, min(most, round(ENOUGH / max(once, 1e-9))))

    # Alternately, so that a slow moment of the machine hits all functions.
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(_turn(run, calls[name], clock) / calls[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def _turn(run: Run, calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return clock() - started
