"""Jit the functions that a step calls, one by one, to time them as its parts.

On CPU the engine's chunk is a loop on the device, so a part is timed in such a loop; starting it
from the host could take longer than the part. Each iteration uses the result of the last, so the
compiler cannot hoist the part out of the loop. On other devices a program runs its part once.

All parts of a `Bench` work on one state at one length: their changes of small arrays are dropped,
so a part costs the same at every call. Buffers that a part writes to are donated, as in the engine.
`measure` times a step of an engine with its slots full of a run's own prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Int, PyTree
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models, running_state
from clover_jax.decoding.programs import Placement, decode_chunk, loops_on_device, options_here
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.state import RUNNING, DecodeState
from clover_jax.decoding.step import (
    StepConfig,
    Weights,
    absorb_last_accepted,
    accept,
    commit,
    draft,
    draft_tree,
    roots,
    speculate_and_verify,
    verify_tree,
)
from clover_jax.decoding.tree import Drafted, TokenTree
from clover_jax.decoding.tree_config import CopyTree, Tree, TreeConfig
from clover_jax.evaluation.compiled import Work, count_work
from clover_jax.evaluation.plan import Method
from clover_jax.models.cache import delta_states, key_values
from clover_jax.runtime.turns import Run

STEPS = 8  # as in the engine's chunks

_BUFFERS = ("tokens", "cache", "draft_cache")  # fields of the state that a step updates in place

# (weights, state, ...) -> (state with its buffers updated, anything else to be consumed)
Stage = Callable[..., tuple[DecodeState, Any]]

METHOD = (
    "the whole step, drafting and verification, each compiled and run alone (on CPU in a loop on "
    "the device) at the run's batch size on its first prompts, alternately; the fastest of 7"
)
_REPEATS = 7


def steps_at_once() -> int:
    """Return the number of steps that a program below runs on this platform."""
    return STEPS if loops_on_device() else 1


def step_loop(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, Int[Array, ""]]:
    """Run whole steps, in which no row may end."""
    if not loops_on_device():
        state, record = speculate_and_verify(config, weights, state)
        return state, record.emitted.sum()

    # Every slot holds a row, or the chunk would end at once.
    filled = jnp.ones_like(state.finish, bool)
    state, records = decode_chunk(config, STEPS, weights, state, filled)
    return state, records.emitted.sum()


def draft_loop(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Absorb and draft, with the token drafted last as the next root.

    Each draft depends on the previous one. Otherwise the compiler would compute a head that reads
    no token (Medusa), and copies of the text, once before the loop, and of other heads only the
    levels that lead to the next root.
    """

    def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, root = carry
        state, drafted = draft(config, weights, state, root)
        tokens = drafted.tree.tokens

        # Token ids are 0 or more, so this adds 0, but the compiler cannot know.
        zero = jnp.minimum(tokens.max(axis=1), 0)
        state = state.replace(
            features=state.features + zero[:, None, None].astype(state.features.dtype),
            next_tokens=state.next_tokens + zero[:, None],
            length=state.length + zero,
        )
        # A slot without a token holds -1, which is not a valid id.
        return state, jnp.maximum(tokens[:, -1], 0) + zero

    return _repeat(body, (state, roots(state)))


def verify_loop(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree
) -> Int[Array, "B T"]:
    """Verify a tree; each iteration fills its slots with the base's choices of the last one."""
    # Sampling is not a part of verification, and greedy choices need no random keys.
    config = dataclasses.replace(config, sampling=GREEDY)

    def body(tokens: Array) -> Array:
        return verify_tree(config, weights, state, tree.replace(tokens=tokens)).predicted

    return _repeat(body, tree.tokens)


def _repeat(body: Callable[[Any], Any], carry: Any) -> Any:
    if not loops_on_device():
        return body(carry)
    return jax.lax.scan(lambda carry, _: (body(carry), None), carry, length=STEPS)[0]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part to time. work: of its products with weights. cache_bytes: read, for all rows."""

    run: Run
    work: Work
    cache_bytes: float = 0.0


class Bench:
    """A state and its weights, which all parts use."""

    def __init__(self, models: Models, batch: int, size: int, context: int):
        """Make a state with `context` committed positions, placed as the models are.

        size: of its buffers, which the parts donate and return.
        """
        self.models = models
        state = Placement(models.mesh).state(running_state(models, batch, size, context))
        # Kept apart: the buffers are donated, while every part reads the small arrays.
        self._buffers = {name: getattr(state, name) for name in _BUFFERS}
        self._small = state.replace(**dict.fromkeys(_BUFFERS, ()))
        live = context / size  # the share of the caches that holds anything
        self.base_cache_bytes = live * _num_bytes(key_values(state.cache))
        self.base_cache_bytes += _num_bytes(delta_states(state.cache))
        # Anything else that a head keeps is looked up, a few entries a step.
        self.draft_cache_bytes = live * _num_bytes(key_values(state.draft_cache))

    @property
    def state(self) -> DecodeState:
        return self._small.replace(**self._buffers)

    def updating(self, stage: Stage, *more: Any, cache_bytes: float = 0.0) -> Part:
        """Return a part that updates the buffers in place: stage(weights, state, *more).

        more: arrays that the stage reads. If it closed over them they would be literals, and the
        compiler would compute ahead what it gathers from them.
        """

        def apply(weights: Weights, buffers: PyTree, small: DecodeState, *more: Any) -> tuple:
            state, rest = stage(weights, small.replace(**buffers), *more)
            left = state.replace(**dict.fromkeys(_BUFFERS, ()))
            return {name: getattr(state, name) for name in _BUFFERS}, (left, rest)

        program = jax.jit(apply, donate_argnums=1, compiler_options=options_here())

        # The buffers passed in are consumed; the next run takes the returned ones.
        def run() -> Any:
            self._buffers, rest = program(self.models.weights, self._buffers, self._small, *more)
            return rest

        work = count_work(lambda *given: stage(*given)[1], self.models.weights, self.state, *more)
        return Part(run, work, cache_bytes)

    def reading(self, stage: Callable[..., Any], *more: Any, cache_bytes: float = 0.0) -> Part:
        """Return a part that changes nothing: stage(weights, state, *more)."""
        program = jax.jit(stage, compiler_options=options_here())

        def run() -> Any:
            return program(self.models.weights, self.state, *more)

        work = count_work(stage, self.models.weights, self.state, *more)
        return Part(run, work, cache_bytes)


def step_part(bench: Bench, sampling: SamplingConfig = GREEDY) -> Part:
    """Return the whole step."""
    stage = functools.partial(speculate_and_verify, bench.models.step(sampling))
    return bench.updating(stage, cache_bytes=bench.base_cache_bytes + bench.draft_cache_bytes)


def chunk_run(bench: Bench, sampling: SamplingConfig) -> Run:
    """Return STEPS steps as the engine runs them, without the host's reads of the text."""
    part = bench.updating(functools.partial(step_loop, bench.models.step(sampling)))

    def run() -> Any:
        for _ in range(STEPS // steps_at_once()):
            result = part.run()
        return result

    return run


def stage_parts(bench: Bench, sampling: SamplingConfig = GREEDY) -> dict[str, Part]:
    """Return absorb, draft (whole, and cut to its first levels), verify, accept and commit.

    "draft" is the last of "draft to level 1", "draft to level 2", ...
    """
    config, levels = bench.models.step(sampling), bench.models.levels

    # Each stage runs once here, because the next one reads its result.
    def absorb(weights: Weights, state: DecodeState) -> tuple[DecodeState, Any]:
        # The cache is updated in place; the next stage drafts from `head_state`.
        head_state, cache = absorb_last_accepted(config, weights, state)
        return state.replace(draft_cache=cache), head_state

    parts = {"absorb": bench.updating(absorb, cache_bytes=bench.draft_cache_bytes)}
    head_state = parts["absorb"].run()[1]

    def draft_levels(
        config: StepConfig, weights: Weights, state: DecodeState, head_state: Any
    ) -> Drafted:
        return draft_tree(config, weights, state, roots(state), head_state)

    # The draft cut to its first levels, so that differences are the time of a level.
    for depth in range(1, levels + 1):
        shorter = dataclasses.replace(config, tree=cut_tree(config.tree, depth))
        # `tree` is static, so every depth is a program of its own.
        stage = functools.partial(draft_levels, shorter)
        parts[f"draft to level {depth}"] = bench.reading(stage, head_state)
    drafted = parts[f"draft to level {levels}"].run()

    def verify(weights: Weights, state: DecodeState, tree: Any) -> Any:
        return verify_tree(config, weights, state, tree)

    parts["verify"] = bench.reading(verify, drafted.tree, cache_bytes=bench.base_cache_bytes)
    verified = parts["verify"].run()

    parts["accept"] = bench.reading(
        lambda _, state, drafted, verified: accept(config, state, drafted, verified),
        drafted,
        verified,
    )
    accepted = parts["accept"].run()
    # As in the step: where a kernel reads the cache, rows are written in another layout.
    commit_here = functools.partial(commit, by_kernel=config.attention == "pallas")
    parts["commit"] = bench.updating(
        lambda weights, *arguments: commit_here(*arguments),
        drafted.tree,
        accepted,
        verified.fresh,
        verified.features,
    )
    return parts


def cut_tree(tree: Tree, depth: int) -> Tree:
    """Return the tree without its deeper levels; copies stay."""
    if isinstance(tree, CopyTree):
        drafted = cut_tree(tree.drafted, depth)
        assert not isinstance(drafted, CopyTree)  # nor was the one that was cut
        return dataclasses.replace(tree, drafted=drafted)
    if isinstance(tree, TreeConfig):
        kept = tuple(path for path in tree.paths if len(path) <= depth)
        return TreeConfig(f"{tree.name} to level {depth}", kept)
    # A dynamic tree chooses its nodes among all that it drafts, and fewer levels draft fewer.
    pool = dataclasses.replace(tree, depth=depth, nodes=1).pool_size
    nodes = min(tree.nodes, pool) if tree.rule == "dynamic" else tree.nodes
    return dataclasses.replace(tree, depth=depth, nodes=nodes)


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


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
    weights = placement.weights(models.weights)
    # Every slot is in use, as in the middle of a run, so short inputs are repeated.
    slots = [requests[i % len(requests)] for i in range(engine.batch_size)]
    slots = [dataclasses.replace(request, index=i) for i, request in enumerate(slots)]

    config = engine.config

    def steps(weights: Weights, state: DecodeState) -> tuple[DecodeState, Array]:
        # Every call starts from the same place in the text; the donated caches are passed on.
        new, emitted = step_loop(config, weights, state)
        return state.replace(cache=new.cache, draft_cache=new.draft_cache), emitted

    def draft_one(weights: Weights, state: DecodeState) -> tuple[DecodeState, TokenTree]:
        state, drafted = draft(config, weights, state)
        return state, drafted.tree

    def verify(weights: Weights, state: DecodeState, tree: TokenTree) -> tuple[DecodeState, Array]:
        return state, verify_loop(config, weights, state, tree)

    def compiled(part: Callable) -> Callable:
        return placement.compiled(part, donate_argnums=1, compiler_options=options_here())

    state = engine.prefilled(weights.base, models.draft_params, slots)
    # No row may end, or the steps would too; writes beyond the buffer are cut off.
    state = state.replace(
        limit=state.limit + (1 << 20),
        eos=jnp.full_like(state.eos, -1),
        finish=jnp.full_like(state.finish, RUNNING),
    )

    # A drafted tree for verification to read; each run fills in new tokens.
    state, tree = compiled(draft_one)(weights, state)
    programs = {"step": (compiled(steps),), "verify": (compiled(verify), tree)}
    if config.head is not None:
        programs["draft"] = (compiled(functools.partial(draft_loop, config)),)

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
    context = max(len(request.prompt_ids) for request in slots) + 1
    return StageTimes(engine.batch_size, context, **{"draft": 0.0, **fastest})
