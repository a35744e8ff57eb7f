"""Read a compiled program: what is executed, what it moves, what it copies and sends.

The text of a compiled module lists computations. Only some are executed instruction by instruction:
the entry, loop bodies, branches. The inside of a fusion is computed on the way and never stored, so
a `copy` there moves nothing in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from experiments.aot.hlo_text import CONTROL, ArrayShape, Computation, Instruction, parse

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Of their operand these read only as much as they return.
_CUTTING = {"dynamic-slice", "gather", "slice", "slice-start"}
# These give every entry of their operand once, so what is cut out of them is cut out of it.
_PASSING = {"bitcast", "convert", "copy", "reshape", "transpose"}
_UPDATING = ("dynamic-update-slice", "scatter")  # in place, where the buffer was donated

# How often loops run that do not say it: one number, or a function of the body's name.
Trips = int | Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops around a computation: the product of known trip counts, and the others' bodies."""

    known: int = 1
    unknown: tuple[str, ...] = ()

    def within(self, trips: int | None, body: str) -> Loops:
        """Return these loops with one more inside."""
        if trips is None:
            return Loops(self.known, (*self.unknown, body))
        return Loops(self.known * trips, self.unknown)

    def times(self, trips: Trips) -> int:
        """Return how often the computation runs."""
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
        """Parse the text that `compiled.as_text()` gives."""
        self.computations, self.entry = parse(text)

    @functools.cached_property
    def executed(self) -> dict[str, Loops]:
        """Computation name -> the loops that it lies in."""
        # From the entry down through the computations that control flow runs.
        loops = {self.entry: Loops()}
        pending = [self.entry]
        while pending:
            name = pending.pop()
            for instruction in self.computations[name].instructions.values():
                # Reductions name a computation too, but it runs inside of them.
                inner = list(instruction.runs) if instruction.opcode in CONTROL else []
                # An asynchronous start calls the computation that runs beside the others.
                if instruction.opcode.startswith("async-start") and instruction.calls:
                    inner.append(instruction.calls)

                for target in inner:
                    if target not in self.computations or target in loops:
                        continue
                    loops[target] = loops[name]
                    if instruction.opcode == "while":
                        trips = self._trip_count(instruction)
                        loops[target] = loops[name].within(trips, instruction.body)
                    pending.append(target)
        return loops

    def _trip_count(self, loop: Instruction) -> int | None:
        """Return a loop's known trips, else the only constant of its condition; None without."""
        if loop.trips is not None or loop.condition not in self.computations:
            return loop.trips
        # A counting loop compares its index with one constant, and nothing else.
        condition = self.computations[loop.condition]
        constants = (i for i in condition.instructions.values() if i.opcode == "constant")
        numbers = [i.number for i in constants if i.number is not None]
        return numbers[0] if len(numbers) == 1 else None

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yield every executed instruction that does something, with where it is."""
        # A copy for the next call is left out: that call lists it, beside its user.
        for name in self.executed:
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                if instruction.is_free or instruction.opcode.startswith("async-start"):
                    continue
                if name != self.entry or instruction.name not in self._for_next_call:
                    yield computation, instruction

    @functools.cached_property
    def _for_next_call(self) -> set[str]:
        """Names of copies that fetch an operand into fast memory for the next call."""
        # A TPU's program finds its first operand there. Where it has used the room for others
        # since, it ends with a second copy, whose result nothing in the program uses.
        entry = self.computations[self.entry].instructions.values()
        prefetched = {i.operands[0] for i in entry if i.crosses_calls}
        used = {operand for i in entry for operand in i.operands}
        finished = {i.operands[0] for i in entry if i.opcode.endswith("-done") and i.name in used}
        return {
            i.name
            for i in entry
            if i.opcode.endswith("-start")
            and not i.crosses_calls
            and prefetched.intersection(i.operands)
            and i.name not in finished
        }

    def times(self, computation: Computation, trips: Trips) -> int:
        """Return how often an executed computation runs."""
        return self.executed[computation.name].times(trips)

    def slices(self, name: str) -> Iterator[ArrayShape]:
        """Yield the results of dynamic slices, in a computation and in those fused into it."""
        for instruction in self.computations[name].instructions.values():
            if instruction.opcode == "dynamic-slice":
                yield from instruction.results
            if instruction.calls:
                yield from self.slices(instruction.calls)

    def moved_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction reads from and writes to main memory.

        An operand counts as the part of it that is used (by a slice, or a look-up in a fusion), and
        so does a buffer that is updated in place.
        """
        written = self.written_bytes(computation, instruction)
        return self._read_bytes(computation, instruction) + written

    def written_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction writes to main memory."""
        # The rest of a buffer that is updated in place stays where it is.
        updates = self._updates(computation, instruction)
        whole = sum(buffer for buffer, _ in updates)
        return max(instruction.result_bytes - whole, 0) + sum(part for _, part in updates)

    def _read_bytes(self, computation: Computation, instruction: Instruction) -> int:
        fused = self.computations.get(instruction.calls or "")
        read = 0
        for index, name in enumerate(instruction.operands):
            operand = computation.instructions.get(name)
            if operand is None or not operand.results:
                continue

            # A slice reads as much as it gives, and an update nothing of its buffer.
            size = operand.result_bytes
            if fused is not None:
                size = min(size, self._used_bytes(fused, index, size))
            elif instruction.opcode in _CUTTING:
                size = min(size, _num_bytes(instruction))
            elif instruction.opcode in _UPDATING and index == 0:
                size = 0
            read += size
        return read

    def _used_bytes(self, fused: Computation, index: int, whole: int) -> int:
        """Return how much of an operand a fusion uses: parts only, where all users cut."""
        for inside in fused.instructions.values():
            if inside.opcode == "parameter" and inside.number == index:
                return self._used_of(fused, inside, whole)
        return whole

    def _used_of(self, fused: Computation, value: Instruction, whole: int) -> int:
        # An operand that is itself the result is read whole.
        used = whole if value.is_root else 0
        # One that was rearranged or widened is another buffer, for which all of it was read.
        is_as_stored = value.opcode in ("parameter", "bitcast")
        for user in fused.instructions.values():
            if value.name not in user.operands:
                continue

            # Fusions lie in fusions, so a slice can be several levels below.
            inner = self.computations.get(user.calls or "")
            if user.opcode in _PASSING:
                used += self._used_of(fused, user, whole)
            elif user.opcode in _CUTTING:  # of as many bytes an entry as the value has here
                used += whole * _num_bytes(user) // max(_num_bytes(value), 1)
            elif user.opcode in _UPDATING and user.operands[0] == value.name and is_as_stored:
                continue  # the rest of the buffer stays where it is
            elif user.opcode == "fusion" and inner is not None:
                used += self._used_bytes(inner, user.operands.index(value.name), whole)
            else:
                return whole
        return min(used, whole)

    def _updates(self, computation: Computation, instruction: Instruction) -> list[tuple[int, int]]:
        """Return the bytes of each buffer that is updated in place, and of the part written."""
        fused = self.computations.get(instruction.calls or "")
        values = [instruction]
        if fused is not None:  # its results are those of its root
            computation, root = fused, fused.root
            names = root.operands if root.opcode == "tuple" else (root.name,)
            values = [fused.instructions[name] for name in names if name in fused.instructions]

        updates = []
        for value in values:
            while value.opcode == "bitcast":
                value = computation.instructions[value.operands[0]]
            if value.opcode in _UPDATING:
                # (buffer, part, starts) and (buffer, indices, parts)
                position = 1 if value.opcode == "dynamic-update-slice" else 2
                part = computation.instructions[value.operands[position]]
                updates.append((_num_bytes(value), _num_bytes(part)))
        return updates

    def made(self, dims: tuple[int, ...]) -> list[Instruction]:
        """Return the executed instructions that write a whole array of these sizes anew.

        An update in place and a prefetch into fast memory are none.
        """
        # Sorted, so that another layout or a transposition is found too.
        wanted = tuple(sorted(dim for dim in dims if dim > 1))
        return [
            instruction
            for computation, instruction in self.instructions()
            if any(a.sizes == wanted and a.in_memory for a in instruction.results)
            and not self._updates(computation, instruction)
        ]

    def largest_results(self, count: int) -> list[Instruction]:
        """Return the executed instructions with the largest results in main memory."""
        # A buffer that is updated in place was there before.
        anew = [i for c, i in self.instructions() if not self._updates(c, i)]
        return sorted(anew, key=lambda i: -i.result_bytes)[:count]

    def collectives(self) -> list[Instruction]:
        """Return the executed instructions that send something to other devices."""
        return [i for _, i in self.instructions() if i.opcode.removesuffix("-start") in COLLECTIVES]

    def sent(self, trips: int) -> list[Sent]:
        """Return the collectives of a run by kind and size, the most bytes first.

        trips: how often loops run that do not say it.
        """
        # A collective that runs beside other work is spread over fusions, which share its channel.
        by_channel: dict[int | str, Sent] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                kind = instruction.opcode.removesuffix("-start")
                runs = self._runs_of(name, trips) if kind in COLLECTIVES else 0
                if runs:
                    channel = instruction.channel or instruction.name
                    by_channel.setdefault(channel, Sent(kind, runs, _num_bytes(instruction)))

        # Layers send alike, so a model's collectives are of a few kinds and sizes.
        counts: collections.Counter[tuple[str, int]] = collections.Counter()
        for each in by_channel.values():
            counts[each.kind, each.num_bytes] += each.times
        merged = [Sent(kind, times, size) for (kind, size), times in counts.items()]
        return sorted(merged, key=lambda each: -each.in_all)

    def _runs_of(self, name: str, trips: int) -> int:
        """Return how often a computation runs, by itself or within a fusion; 0 if never."""
        if name in self.executed:
            return self.executed[name].times(trips)
        callers = self._callers.get(name, ())
        return max((self._runs_of(caller, trips) for caller in callers), default=0)

    @functools.cached_property
    def _callers(self) -> dict[str, set[str]]:
        """Fused computation -> the computations whose instructions call it."""
        # Backwards: a fusion's text does not say where it is used.
        callers: dict[str, set[str]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                if instruction.calls:
                    callers.setdefault(instruction.calls, set()).add(name)
        return callers


def _num_bytes(instruction: Instruction) -> int:
    """Return the bytes of its results, wherever they lie."""
    return sum(array.num_bytes for array in instruction.results)
