"""The cost table of a machine: verification by slots, drafting by level and width."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.decoding.programs import Placement
from clover_jax.decoding.tree import TokenTree
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.loading.decode_states import cache_size
from clover_jax.loading.models import Models
from clover_jax.timing.loops import draft_loop, step_loop, steps_at_once, verify_loop
from clover_jax.timing.parts import Bench
from clover_jax.timing.turns import Run, time_in_turns
from clover_jax.tree_search.tree_choice import CostTable

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (1, 2, 4, 8)
ROUNDS = 7
_ONE_LEVEL = TreeConfig("1", ((0,),))


def measure_costs(
    models: Models,
    batch: int,
    context: int,
    slots: Sequence[int] = SLOTS,
    widths: Sequence[int] = WIDTHS,
    rounds: int = ROUNDS,
    depth: int = 2,
) -> CostTable:
    """Time the parts of steps with trees of several sizes, alternating, as `loops` runs them.

    slots: sizes of trees to verify; that of the tree whose whole step is timed is added.
    depth: of that tree, a chain. The head absorbs depth + 1 positions, as after a full accept, so
        costs of deeper trees come out a little low.
    Raises UserError where the context is longer than the base's.
    """
    assert models.head is not None  # only a head's tree has costs
    # The step that is timed as a whole drafts a chain of `depth`, or less if the head ends before.
    deepest = models.head.config.max_depth or depth
    models = models.with_tree(parse_tree(f"chain:{min(depth, deepest)}"))
    size = cache_size(models, context, room=0)
    placement = Placement(models.mesh)
    batch = placement.whole_rows(batch)

    bench = Bench(models, batch, size, context)
    plain = Bench(models.plain(), batch, size, context)
    # The rest of a step is a small difference, so interpolating a part of it would be noise.
    slots = sorted({*slots, models.tree.num_slots})
    # A level has no more nodes than there are tokens; a head of one level expands none.
    widths = [width for width in widths if width <= models.base.config.vocab_size and deepest > 1]

    # Each program is timed by itself, alternating with the others.
    runs: dict[str, Run] = {
        "plain": _in_place(plain, step_loop),
        "step": _in_place(bench, step_loop),
        "draft": _in_place(bench, draft_loop),
        "draft 0": _in_place(bench, draft_loop, _ONE_LEVEL),
    }
    for width in widths:
        runs[f"draft {width}"] = _in_place(bench, draft_loop, _two_levels(width))
    runs |= {f"verify {count}": _verifying(bench, batch, count) for count in slots}
    with placement.in_use():
        timed = time_in_turns(runs, rounds)

    # One level alone holds absorbing too; further levels are what they add to it.
    seconds = {name: run / steps_at_once() for name, run in timed.items()}
    flat = seconds["draft 0"]
    parts = seconds["draft"] + seconds[f"verify {models.tree.num_slots}"]
    return CostTable(
        plain=seconds["plain"],
        verify=tuple((count, seconds[f"verify {count}"]) for count in slots),
        first=flat,
        # Noise can make a small difference negative.
        level=tuple((width, max(seconds[f"draft {width}"] - flat, 0.0)) for width in widths),
        rest=max(seconds["step"] - parts, 0.0),
    )


def _in_place(bench: Bench, loop: Callable[..., Any], tree: TreeConfig | None = None) -> Run:
    """Return steps or their first half, from the same place in the text each time."""
    models = bench.models if tree is None else bench.models.with_tree(tree)
    return bench.updating(functools.partial(loop, models.step())).run


def _two_levels(width: int) -> TreeConfig:
    """Return the tree of `width` children of the root with a child each."""
    first = tuple((rank,) for rank in range(width))
    return TreeConfig(f"{width} by 2", first + tuple((*path, 0) for path in first))


def _verifying(bench: Bench, batch: int, count: int) -> Run:
    """Return the base's forward over `count` slots: a root and its children."""
    tokens = jax.random.randint(
        jax.random.key(3), (batch, count), 0, bench.models.base.config.vocab_size, jnp.int32
    )
    # The parent of the root is -1, all other slots are its children.
    parent = jnp.where(jnp.arange(count) == 0, -1, 0)[None]
    loop = functools.partial(verify_loop, bench.models.step())
    return bench.reading(loop, TokenTree(tokens, parent, depth=1)).run
