"""The time of a step and of its parts, each compiled and timed alone, at the shapes of the run.

A part runs as in the engine's chunks, in a loop on the device or by itself (`timing.loops`). The
rest of a step is accepting, committing, and parts that do not overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import options_here
from clover_jax.decoding.requests import Request
from clover_jax.decoding.state import RUNNING, DecodeState
from clover_jax.decoding.step import StepConfig, Weights, absorb_and_draft, roots, weights_for
from clover_jax.decoding.tree import TokenTree
from clover_jax.evaluation.parts import STEPS, draft_loop, step_loop, steps_at_once, verify_loop
from clover_jax.evaluation.plan import Method

METHOD = (
    "the whole step, drafting and verification, each compiled and run alone (on CPU in a loop on "
    "the device) at the run's batch size on its first prompts, alternately; the fastest of 7"
)
_REPEATS = 7


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Seconds of one step with a full batch, and of its parts; draft is 0 for plain decoding."""

    batch_size: int
    context: int
    step: float
    draft: float
    verify: float

    def to_dict(self, plain: StageTimes) -> dict[str, Any]:
        """Return seconds, shares, and the cost of a step in steps of plain decoding."""
        # Parts that overlap within a step may add up to more than the step.
        rest = max(self.step - self.draft - self.verify, 0.0)
        total = self.draft + self.verify + rest
        return {
            **dataclasses.asdict(self),
            "rest": rest,
            "draft_share": self.draft / total,
            "verify_share": self.verify / total,
            "rest_share": rest / total,
            # A draft gains time where its tau exceeds this.
            "break_even_tau": self.step / plain.step,
        }


def measure(method: Method, engine: Engine, requests: Sequence[Request]) -> StageTimes:
    """Time a step of the engine and its parts, with its slots full.

    The programs alternate on one state, as a second one may not fit into memory.
    """
    models, placement = method.models, engine.placement
    weights = weights_for(engine.config.head, models.base.params, models.draft_params)
    weights = placement.weights(weights)
    # Every slot is in use, as in the middle of a run, so short inputs are repeated.
    slots = [requests[i % len(requests)] for i in range(engine.batch_size)]
    slots = [dataclasses.replace(request, index=i) for i, request in enumerate(slots)]

    def compiled(part: Callable) -> Callable:
        part = functools.partial(part, engine.config)
        return placement.compiled(part, donate_argnums=1, compiler_options=options_here())

    state = engine.prefilled(weights.base, models.draft_params, slots)
    # No row may end, or the steps would too; writes beyond the buffer are cut off.
    state = state.replace(
        limit=state.limit + (1 << 20),
        eos=jnp.full_like(state.eos, -1),
        finish=jnp.full_like(state.finish, RUNNING),
    )

    # A drafted tree for verification to read; each run fills in new tokens.
    state, tree = compiled(_draft)(weights, state)
    verify = compiled(lambda config, w, state, tree: (state, verify_loop(config, w, state, tree)))
    programs = {"step": (compiled(_steps),), "verify": (verify, tree)}
    if engine.config.head is not None:
        programs["draft"] = (compiled(draft_loop),)

    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(_REPEATS + 1):
        for name, (program, *more) in programs.items():
            started = time.perf_counter()
            # STEPS steps in total, in one call or in several.
            for _ in range(STEPS // steps_at_once()):
                state, result = program(weights, state, *more)
            jax.block_until_ready((state, result))
            times[name].append(time.perf_counter() - started)
    # The first run compiles. The fastest is the one that nothing else disturbed.
    fastest = {name: min(seconds[1:]) / STEPS for name, seconds in times.items()}
    return StageTimes(
        batch_size=engine.batch_size,
        context=max(len(request.prompt_ids) for request in slots) + 1,
        **{"draft": 0.0, **fastest},
    )


def _steps(config: StepConfig, weights: Weights, state: DecodeState) -> tuple[DecodeState, Array]:
    """Run steps; every call starts from the same place in the text."""
    # The caches are passed on, since they were donated; everything else stays.
    new, emitted = step_loop(config, weights, state)
    return state.replace(cache=new.cache, draft_cache=new.draft_cache), emitted


def _draft(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, TokenTree]:
    root = roots(state)
    if config.head is None:
        return state, TokenTree.root_only(root)
    state, drafted = absorb_and_draft(config, weights, state, root)
    return state, drafted.tree
