"""Sum up a compiled program: bytes and time by part of the step, copies, what costs most.

trips: how often loops run whose count is data; a program does not say.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from clover_jax.array_types import PyTree
from clover_jax.evaluation.measured import STAGES  # scopes of a decode step
from clover_jax.evaluation.targets import Chip
from experiments.aot.hlo import Program, Trips
from experiments.aot.hlo_text import Computation, Instruction, short_source

OTHER = "other"  # instructions that belong to no part: a few scalars
TOP = 8  # ops and temporaries that are named
WORTH_NAMING = 64 * 1024  # bytes; smaller ops are latency
MEBI = 2**20


def sum_by_part(
    program: Program,
    value: Callable[[Computation, Instruction], float],
    parts: Sequence[str] = STAGES,
) -> dict[str, float]:
    """Return part -> sum of a value over its executed instructions; parts: names of scopes."""
    by_computation = {name: part_of(program, name, parts) for name in program.executed}
    totals: dict[str, float] = collections.defaultdict(float)
    for computation, instruction in program.instructions():
        part = by_computation[computation.name][instruction.name]
        totals[part] += value(computation, instruction)
    return {part: totals[part] for part in (*parts, OTHER) if part in totals}


def part_of(program: Program, name: str, parts: Sequence[str] = STAGES) -> Mapping[str, str]:
    """Return instruction -> part for one computation of the program."""
    part_by_name: dict[str, str] = {}

    # The named scope of an instruction says its part. The compiler adds some without a scope, such
    # as prefetches and the second half of a divided product: they belong to the first part that
    # uses their result.
    #
    # Operands come first in the text, so in reverse every user comes before its operands, and the
    # earliest of several users has the last word.
    for instruction in reversed(program.computations[name].instructions.values()):
        part = _scope(instruction, parts) or part_by_name.get(instruction.name, OTHER)
        part_by_name[instruction.name] = part
        if part != OTHER:
            part_by_name |= dict.fromkeys(instruction.operands, part)
    return part_by_name


def _scope(instruction: Instruction, parts: Sequence[str]) -> str | None:
    """Return the outermost scope that is a part.

    Example: of "while/body/transpose(jvp(head))/dot_general" it is "head".
    """
    for scope in short_source(instruction.source).split("/"):
        name = scope.rpartition("(")[2].rstrip(")")
        if name in parts:
            return name
    return None


@dataclasses.dataclass(frozen=True)
class Live:
    """How much of the caches is read: `share` of arrays [B, K, positions, H]."""

    share: float
    positions: int


def moved_by_part(program: Program, trips: Trips, live: Live) -> dict[str, float]:
    """Return the bytes that each stage of a decode step reads and writes in main memory."""

    def moved(where: Computation, one: Instruction) -> float:
        once = program.moved_bytes(where, one)
        return (once - _unread_bytes(where, one, live)) * program.times(where, trips)

    return sum_by_part(program, moved)


def _unread_bytes(where: Computation, kernel: Instruction, live: Live) -> float:
    """Return the bytes of a kernel's operands that it leaves alone: caches beyond a row's end."""
    if kernel.declared is None:
        return 0.0
    operands = [where.instructions[name] for name in kernel.operands if name in where.instructions]
    caches = (
        operand.result_bytes
        for operand in operands
        if len(operand.results) == 1 and operand.results[0].dims[2:3] == (live.positions,)
    )
    return (1 - live.share) * sum(caches)


def kernel_seconds(program: Program, chip: Chip, trips: Trips, live: Live) -> dict[str, float]:
    """Return the least time of each part's kernels: the bytes that they move, or declared products.

    For what the compiler knows no cycles of.
    """

    def seconds(where: Computation, one: Instruction) -> float:
        if one.declared is None:
            return 0.0
        moved = program.moved_bytes(where, one) - _unread_bytes(where, one, live)
        least = chip.floor(moved, live.share * one.declared.flops)
        return least * program.times(where, trips)

    return {part: least for part, least in sum_by_part(program, seconds).items() if least}


def estimated_seconds(
    program: Program, chip: Chip, trips: Trips, parts: Sequence[str] = STAGES
) -> dict[str, float] | None:
    """Return the compiler's time for each part of the step; None where it gives no cycles."""
    cycles = sum_by_part(
        program, lambda where, one: one.cycles * program.times(where, trips), parts
    )
    if not chip.clock or not any(cycles.values()):
        return None
    return {part: count / chip.clock for part, count in cycles.items()}


def cache_turns(program: Program, context: int, body: str) -> int:
    """Return how often a loop over a cache of `context` live positions runs, by its body."""
    # Each part of a step reads by chunks of its own size: the slices of [B, K, S, H] that it cuts.
    chunks = [cut.dims[2] for cut in program.slices(body) if len(cut.dims) == 4]
    return math.ceil(context / max(chunks)) if chunks else 1


def compilers_cost(compiled: Any, name: str) -> float | None:
    """Return one of the compiler's own costs; None where it gives none."""
    try:
        costs = compiled.cost_analysis()
    except Exception:  # not every compiler for absent devices has one
        return None
    return None if not costs else costs.get(name)


def written_anew(program: Program, arrays: PyTree) -> list[str]:
    """Return the instructions whose results have the size of a shard of one of the arrays.

    arrays: ShapeDtypeStructs with shardings.
    """
    # Small arrays are left out: a bias by heads has the size of many an activation. So are vectors:
    # a quantized lm_head's scales are prefetched whole.
    shards = {
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(arrays)
        if sum(size > 1 for size in leaf.shape) > 1
        and leaf.size * leaf.dtype.itemsize >= WORTH_NAMING
    }
    return listed(i for shard in sorted(shards) for i in program.made(shard))


def listed(instructions: Iterable[Instruction]) -> list[str]:
    """Return each kind of instruction once, with its count."""
    counts = collections.Counter(str(instruction) for instruction in instructions)
    return [f"{count} x {name}" for name, count in counts.most_common()]


def titled_lines(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each title with its items below, for a report."""
    lines = []
    for title, items in groups.items():
        lines.append(f"{title}:" if items else f"{title}: none")
        lines += [f"  {item}" for item in items]
    return lines


def costly(program: Program, chip: Chip, trips: Trips) -> list[str]:
    """Return the ops that cost most above the time that their bytes take."""
    # Where the compiler estimates no cycles, the bytes written stand for the cost.
    above: dict[str, float] = collections.defaultdict(float)
    for computation, instruction in program.instructions():
        scope = short_source(instruction.source) or instruction.opcode
        if chip.clock:  # bytes that must be moved are no excess
            moved = program.moved_bytes(computation, instruction)
            seconds = max(instruction.cycles / chip.clock - moved / chip.bandwidth, 0.0)
        else:
            seconds = program.written_bytes(computation, instruction) / chip.bandwidth
        above[f"{instruction.opcode} {scope}"] += seconds * program.times(computation, trips)
    most = sorted(above.items(), key=lambda each: -each[1])[:TOP]
    return [f"{1e6 * seconds:.0f} us {name}" for name, seconds in most]


def largest(program: Program) -> list[str]:
    """Return the largest results in main memory."""
    results = [i for i in program.largest_results(TOP) if i.result_bytes >= WORTH_NAMING]
    return [f"{i.result_bytes / MEBI:.1f} MiB {i}" for i in results]
