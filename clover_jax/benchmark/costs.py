"""The cost table of a machine: verification by slots, drafting by level and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.benchmark.parts import Bench, Part, drafting, stage_parts, step_part
from clover_jax.benchmark.subject import Subject, cache_size, running_state
from clover_jax.benchmark.timing import Run, time_in_turns
from clover_jax.benchmark.tree_choice import CostTable
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import Weights, verify_tree
from clover_jax.decoding.tree import TokenTree, TreeConfig

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (1, 2, 4, 8)
ROUNDS = 7


def measure_costs(
    subject: Subject,
    batch: int,
    context: int,
    slots: Sequence[int] = SLOTS,
    widths: Sequence[int] = WIDTHS,
    rounds: int = ROUNDS,
) -> CostTable:
    """Time the parts of steps with trees of several sizes, in turns.

    Raises UserError where the context is longer than the base's.
    """
    # Deep enough for the longest pending path; the shape of the tree does not matter to the base.
    subject = subject.with_tree(_two_levels(1))
    size = cache_size(subject, context, room=0)
    bench = Bench(subject, running_state(subject, batch, size, context), context)
    plain_subject = subject.plain()
    plain = Bench(plain_subject, running_state(plain_subject, batch, size, context), context)
    stages = stage_parts(bench)
    root_state = stages["absorb"].run()[1]
    widths = [width for width in widths if width <= subject.base.vocab_size]
    runs: dict[str, Run] = {"plain": step_part(plain).run}
    runs |= {name: stages[name].run for name in ("absorb", "accept", "commit")}
    runs["first"] = stages["draft to level 1"].run
    for width in widths:
        deeper = subject.with_tree(_two_levels(width)).step()
        runs[f"level {width}"] = bench.reading(drafting(deeper), root_state).run
    runs |= {f"verify {count}": _verifying(bench, batch, count).run for count in slots}
    seconds = time_in_turns(runs, rounds)
    return CostTable(
        plain=seconds["plain"],
        verify=tuple((count, seconds[f"verify {count}"]) for count in slots),
        absorb=seconds["absorb"],
        first_level=seconds["first"],
        level=tuple(
            (width, max(seconds[f"level {width}"] - seconds["first"], 0.0)) for width in widths
        ),
        rest=seconds["accept"] + seconds["commit"],
    )


def _two_levels(width: int) -> TreeConfig:
    """Return the tree of `width` children of the root with a child each."""
    first = tuple((rank,) for rank in range(width))
    return TreeConfig(f"{width} by 2", first + tuple((*path, 0) for path in first))


def _verifying(bench: Bench, batch: int, count: int) -> Part:
    """Return the base's forward over `count` slots: a root and its children."""
    config = bench.subject.step()
    tokens = jax.random.randint(
        jax.random.key(3), (batch, count), 0, bench.subject.base.vocab_size, jnp.int32
    )
    parent = jnp.where(jnp.arange(count) == 0, -1, 0)[None]

    def stage(weights: Weights, state: DecodeState, tree: TokenTree) -> Any:
        return verify_tree(config, weights, state, tree)

    return bench.reading(stage, TokenTree(tokens, parent))
