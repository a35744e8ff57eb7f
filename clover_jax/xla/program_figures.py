"""Figures of a compiled program, whichever step it is: time, copies, what costs most.

trips: how often loops run whose count is data; a program does not say.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from clover_jax.array_types import PyTree
from clover_jax.xla.hlo import Program, Trips
from clover_jax.xla.hlo_parts import PARTS, sum_by_part
from clover_jax.xla.hlo_text import Computation, Instruction, short_source
from clover_jax.xla.targets import Chip

TOP = 8  # ops and temporaries that are named
WORTH_NAMING = 64 * 1024  # bytes; smaller ops are latency
MEBI = 2**20


def times(program: Program, computation: Computation, trips: Trips) -> int:
    """Return how often a computation runs."""
    return program.executed[computation.name].times(trips)


def cache_turns(program: Program, context: int, body: str) -> int:
    """Return how often a loop over a cache of `context` live positions runs, by its body.

    Every part of a step reads by a chunk of its own: how much a slice of [B, K, S, H] cuts.
    """
    chunks = [cut.dims[2] for cut in program.slices(body) if len(cut.dims) == 4]
    return math.ceil(context / max(chunks)) if chunks else 1


def compilers_cost(compiled: Any, name: str) -> float | None:
    """Return one of the compiler's own costs; None where it gives none."""
    try:
        costs = compiled.cost_analysis()
    except Exception:  # not every compiler for absent devices has one
        return None
    return None if not costs else costs.get(name)


def estimated_seconds(
    program: Program, chip: Chip, trips: Trips, parts: Sequence[str] = PARTS
) -> dict[str, float] | None:
    """Return the compiler's cycle estimates by part of the step; None where it gives none."""
    cycles = sum_by_part(
        program, lambda where, one: one.cycles * times(program, where, trips), parts
    )
    if not chip.clock or not any(cycles.values()):
        return None
    return {part: count / chip.clock for part, count in cycles.items()}


def resident_bytes(memory: Any, temporaries: int) -> int:
    """Return what a device holds at most: a compiler's `memory_analysis`, and what it allocates."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + temporaries
    )


def written_anew(program: Program, arrays: PyTree, places: PyTree) -> list[str]:
    """Return the instructions that write anew what has the size of one of the arrays' shards.

    A small one, a bias by heads, has the size of many an activation; a vector, such as the steps of
    a rounded lm_head, is prefetched whole.
    """
    shards = {
        place.shard_shape(leaf.shape)
        for leaf, place in zip(jax.tree.leaves(arrays), jax.tree.leaves(places), strict=True)
        if _is_matrix(leaf.shape) and leaf.size * leaf.dtype.itemsize >= WORTH_NAMING
    }
    return listed(i for shard in sorted(shards) for i in program.made(shard))


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def listed(instructions: Iterable[Instruction]) -> list[str]:
    """Return each kind of instruction once, with how many there are."""
    counts = collections.Counter(str(instruction) for instruction in instructions)
    return [f"{count} x {name}" for name, count in counts.most_common()]


def costly(program: Program, chip: Chip, trips: Trips) -> list[str]:
    """Return what costs most above the time that its bytes take.

    Where the compiler estimates no cycles, what writes most to memory.
    """
    above: collections.Counter[str] = collections.Counter()
    for computation, instruction in program.instructions():
        runs = times(program, computation, trips)
        where = short_source(instruction.source) or instruction.opcode
        what = f"{instruction.opcode} {where}"
        if chip.clock:
            moved = program.moved_bytes(computation, instruction)
            excess = instruction.cycles / chip.clock - moved / chip.bandwidth
            above[what] += runs * max(excess, 0.0)
        else:
            above[what] += runs * program.written_bytes(computation, instruction) / chip.bandwidth
    return [f"{1e6 * value:.0f} us {name}" for name, value in above.most_common(TOP)]


def largest(program: Program) -> list[str]:
    """Return the largest results in main memory."""
    found = [i for i in program.largest_results(TOP) if i.result_bytes >= WORTH_NAMING]
    return [f"{i.result_bytes / MEBI:.1f} MiB {i}" for i in found]
