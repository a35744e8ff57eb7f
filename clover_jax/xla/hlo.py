"""Read a compiled program: what is really executed, what it moves, what it copies and sends.

The text of a compiled module lists computations. Only some are executed instruction by instruction:
the entry, loop bodies, branches. What lies inside a fusion is computed on the way and never stored,
so a `copy` there moves nothing in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from clover_jax.xla.hlo_bytes import is_in_place, moved_bytes, written_bytes
from clover_jax.xla.hlo_text import CONTROL, ArrayShape, Computation, Instruction, parse

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


# Of loops that do not say it: how often they run, or how often by the name of the body.
Trips = int | Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops around something: the product of the known trip counts, and the others' bodies."""

    known: int = 1
    unknown: tuple[str, ...] = ()

    def within(self, trips: int | None, body: str) -> Loops:
        """Return these loops with one more inside."""
        if trips is None:
            return Loops(self.known, (*self.unknown, body))
        return Loops(self.known * trips, self.unknown)

    def times(self, trips: Trips) -> int:
        """Return how often it runs, where an unknown loop has so many trips."""
        counts = (trips if isinstance(trips, int) else trips(body) for body in self.unknown)
        return self.known * math.prod(counts)


@dataclasses.dataclass(frozen=True)
class Sent:
    """One kind of collective: how often in a run, and the bytes of one's result on a device."""

    kind: str
    times: int
    num_bytes: int

    @property
    def in_all(self) -> int:
        """Bytes of a run."""
        return self.times * self.num_bytes


class Program:
    """A compiled module, from its text."""

    def __init__(self, text: str):
        """Parse what `compiled.as_text()` gives."""
        self.computations, self.entry = parse(text)

    @functools.cached_property
    def executed(self) -> dict[str, Loops]:
        """Computation name -> the loops that it lies in."""
        found = {self.entry: Loops()}
        pending = [self.entry]
        while pending:
            name = pending.pop()
            for instruction in self.computations[name].instructions.values():
                inner = list(instruction.runs) if instruction.opcode in CONTROL else []
                if instruction.opcode.startswith("async-start") and instruction.calls:
                    inner.append(instruction.calls)
                for target in inner:
                    if target in self.computations and target not in found:
                        loops = found[name]
                        if instruction.opcode == "while":
                            loops = loops.within(self._trip_count(instruction), instruction.body)
                        found[target] = loops
                        pending.append(target)
        return found

    def _trip_count(self, loop: Instruction) -> int | None:
        """Return a loop's known trips, else the only constant of its condition; None without."""
        if loop.trips is not None:
            return loop.trips
        condition = self.computations.get(loop.condition or "")
        if condition is None:
            return None
        numbers = [
            i.number
            for i in condition.instructions.values()
            if i.opcode == "constant" and i.number is not None
        ]
        return numbers[0] if len(numbers) == 1 else None

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yield every executed instruction that does something, with where it is."""
        for name in self.executed:
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                if not instruction.is_free and not instruction.opcode.startswith("async-start"):
                    yield computation, instruction

    def slices(self, name: str) -> Iterator[ArrayShape]:
        """Yield what dynamic slices cut, in a computation and in those fused into it."""
        for instruction in self.computations[name].instructions.values():
            if instruction.opcode == "dynamic-slice":
                yield from instruction.results
            if instruction.calls:
                yield from self.slices(instruction.calls)

    def moved_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction reads from and writes to main memory."""
        return moved_bytes(self.computations, computation, instruction)

    def written_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction writes to main memory."""
        return written_bytes(self.computations, computation, instruction)

    def made(self, dims: tuple[int, ...]) -> list[Instruction]:
        """Return the executed instructions that write a whole array of these sizes anew.

        In any layout or transposition; an update in place and a prefetch into fast memory are none.
        """
        wanted = tuple(sorted(dim for dim in dims if dim > 1))
        return [
            instruction
            for _, instruction in self.instructions()
            if any(a.sizes == wanted and a.in_memory for a in instruction.results)
            and not is_in_place(self.computations, instruction)
        ]

    def collectives(self) -> list[Instruction]:
        """Return the executed instructions that send something to other devices."""
        return [i for _, i in self.instructions() if i.opcode.removesuffix("-start") in COLLECTIVES]

    def sent(self, trips: int) -> list[Sent]:
        """Return what a run sends, the most bytes first.

        trips: how often loops run that do not say it. A collective that runs beside other work is
        spread over fusions; it counts once.
        """
        found = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                kind = instruction.opcode.removesuffix("-start")
                runs = self._times(name, trips)
                if kind in COLLECTIVES and runs:
                    key = instruction.channel or instruction.name
                    size = sum(array.num_bytes for array in instruction.results)
                    found.setdefault(key, Sent(kind, runs, size))
        counts: collections.Counter[tuple[str, int]] = collections.Counter()
        for each in found.values():
            counts[each.kind, each.num_bytes] += each.times
        merged = [Sent(kind, times, size) for (kind, size), times in counts.items()]
        return sorted(merged, key=lambda each: -each.in_all)

    def _times(self, name: str, trips: int) -> int:
        """Return how often a computation runs, by itself or within a fusion; 0 if never."""
        if name in self.executed:
            return self.executed[name].times(trips)
        return max(
            (self._times(caller, trips) for caller in self._callers.get(name, ())), default=0
        )

    @functools.cached_property
    def _callers(self) -> dict[str, set[str]]:
        """Fused computation -> the computations whose instructions call it."""
        found: dict[str, set[str]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                if instruction.calls:
                    found.setdefault(instruction.calls, set()).add(name)
        return found

    def largest_results(self, count: int) -> list[Instruction]:
        """Return the executed instructions with the largest results in main memory."""
        found = [i for _, i in self.instructions() if not is_in_place(self.computations, i)]
        return sorted(found, key=lambda i: -i.result_bytes)[:count]
