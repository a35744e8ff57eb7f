"""Which part of a step an instruction of the compiled program belongs to.

Its named scope says so. What the compiler added by itself, such as prefetches and the second half
of a divided product, has none: it belongs to the first part that uses its result.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from clover_jax.xla.hlo import Program
from clover_jax.xla.hlo_text import Computation, Instruction, short_source

PARTS = ("absorb", "draft", "verify", "accept", "commit")
OTHER = "other"  # what nobody claims: a few scalars


def sum_by_part(
    program: Program,
    value: Callable[[Computation, Instruction], float],
    parts: Sequence[str] = PARTS,
) -> dict[str, float]:
    """Return part -> sum of a value over its executed instructions.

    parts: the scopes that stand for them, those of a decode step by default.
    """
    names = {name: part_of(program, name, parts) for name in program.executed}
    totals: collections.Counter[str] = collections.Counter()
    for computation, instruction in program.instructions():
        totals[names[computation.name][instruction.name]] += value(computation, instruction)
    return {part: totals[part] for part in (*parts, OTHER) if part in totals}


def part_of(program: Program, name: str, parts: Sequence[str] = PARTS) -> Mapping[str, str]:
    """Return instruction -> part for one computation of the program."""
    computation = program.computations[name]
    found: dict[str, str] = {}
    # Operands come first in the text, so that users are known before what they use.
    for instruction in reversed(computation.instructions.values()):
        part = _scope(instruction, parts)
        if part is not None:
            found[instruction.name] = part
        elif instruction.name not in found:
            found[instruction.name] = OTHER
        if found[instruction.name] == OTHER:
            continue
        for operand in instruction.operands:
            # Later users were there before: the earliest has the last word.
            found[operand] = found[instruction.name]
    return found


def _scope(instruction: Instruction, parts: Sequence[str]) -> str | None:
    """Return the outermost scope that is a part.

    Example: of "while/body/transpose(jvp(head))/dot_general" it is "head".
    """
    for scope in short_source(instruction.source).split("/"):
        name = scope.rpartition("(")[2].rstrip(")")
        if name in parts:
            return name
    return None
