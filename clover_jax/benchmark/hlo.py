"""Read a compiled program: what is really executed, what it moves, what it copies and sends.

The text of a compiled module lists computations. Only some are executed instruction by instruction:
the entry, loop bodies, branches. What lies inside a fusion is computed on the way and never stored,
so a `copy` there moves nothing in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

# Names without work of their own: their operands' memory under another name.
_ALIASES = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "tuple",
}
_CONTROL = {"call", "conditional", "while"}  # what they run is counted in its own place
_CUTTING = {"dynamic-slice", "gather", "slice", "slice-start"}  # reads as much as it gives
_UPDATING = ("dynamic-update-slice", "scatter")  # in place, where the buffer was donated
_ENDS = ("-done", "-update")  # of an operation that was counted when it started
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_RUNS = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of an instruction's result.

    dims: its sizes. in_memory: False for the fast memory inside a TPU core, where the compiler
        puts what it prefetches.
    """

    dtype: str
    dims: tuple[int, ...]
    in_memory: bool

    @property
    def num_bytes(self) -> int:
        """Its size."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype) or 8)
        size = 1
        for dim in self.dims:
            size *= dim
        return size * bits // 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes without ones, sorted: the same for every layout and transposition."""
        return tuple(sorted(dim for dim in self.dims if dim > 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    operands: names, in the same computation. calls: the fused computation of a fusion.
    number: which one it is, for a parameter; the value, for a whole constant.
    cycles: the compiler's estimate, where it gives one. source: the path of named scopes.
    """

    name: str
    opcode: str
    results: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    runs: tuple[str, ...]
    condition: str | None
    calls: str | None
    cycles: int
    source: str
    is_root: bool
    number: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether it moves nothing by itself."""
        return self.opcode in _ALIASES | _CONTROL or self.opcode.endswith(_ENDS)

    @property
    def result_bytes(self) -> int:
        """Bytes of its results in main memory."""
        return sum(array.num_bytes for array in self.results if array.in_memory)

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.results))
        return f"{self.opcode} {shapes} ({short_source(self.source)})"


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops around something: the product of the known trip counts, and how many are not."""

    known: int = 1
    unknown: int = 0

    def within(self, trips: int | None) -> Loops:
        """Return these loops with one more inside."""
        if trips is None:
            return Loops(self.known, self.unknown + 1)
        return Loops(self.known * trips, self.unknown)

    def times(self, trips: int) -> int:
        """Return how often it runs, where every unknown loop has so many trips."""
        return self.known * trips**self.unknown


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The one whose result is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)


class Program:
    """A compiled module, from its text."""

    def __init__(self, text: str):
        """Parse what `compiled.as_text()` gives."""
        self.computations = dict(_parse(text))
        self.entry = next(name for name, is_entry in _headers(text) if is_entry)

    @functools.cached_property
    def executed(self) -> dict[str, Loops]:
        """Computation name -> the loops that it lies in."""
        found = {self.entry: Loops()}
        pending = [self.entry]
        while pending:
            name = pending.pop()
            for instruction in self.computations[name].instructions.values():
                inner = list(instruction.runs) if instruction.opcode in _CONTROL else []
                if instruction.opcode.startswith("async-start") and instruction.calls:
                    inner.append(instruction.calls)
                for target in inner:
                    if target in self.computations and target not in found:
                        loops = found[name]
                        if instruction.opcode == "while":
                            loops = loops.within(self._trip_count(instruction))
                        found[target] = loops
                        pending.append(target)
        return found

    def _trip_count(self, loop: Instruction) -> int | None:
        """Return the constant with which a loop's condition compares, None where there is none."""
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

    def moved_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction reads from and writes to main memory.

        An operand of which only a part is used (by a slice or a look-up in a fusion) counts as
        that part, and so does a buffer that is updated in place.
        """
        fused = self.computations.get(instruction.calls or "")
        updates = _updates(fused) if fused else _own_updates(computation, instruction)
        written = instruction.result_bytes
        if updates:
            whole = [update.buffer_bytes for update in updates]
            written = max(written - sum(whole), 0) + sum(update.part_bytes for update in updates)
        read = 0
        for index, name in enumerate(instruction.operands):
            operand = computation.instructions.get(name)
            if operand is None or not operand.results:
                continue
            size = operand.result_bytes
            if fused is not None:
                size = min(size, _used_bytes(self.computations, fused, index, size))
            elif instruction.opcode in _CUTTING:
                size = min(size, sum(array.num_bytes for array in instruction.results))
            elif instruction.opcode in _UPDATING and index == 0:
                size = 0
            read += size
        return read + written

    def made(self, dims: tuple[int, ...]) -> list[Instruction]:
        """Return the executed instructions that write a whole array of these sizes anew.

        In any layout or transposition; an update in place and a prefetch into fast memory are none.
        """
        wanted = tuple(sorted(dim for dim in dims if dim > 1))
        return [
            instruction
            for _, instruction in self.instructions()
            if any(a.sizes == wanted and a.in_memory for a in instruction.results)
            and not self._is_in_place(instruction)
        ]

    def _is_in_place(self, instruction: Instruction) -> bool:
        if instruction.opcode in _UPDATING:
            return True
        fused = self.computations.get(instruction.calls or "")
        return bool(fused and _updates(fused))

    def collectives(self) -> list[Instruction]:
        """Return the executed instructions that send something to other devices."""
        return [i for _, i in self.instructions() if i.opcode.removesuffix("-start") in COLLECTIVES]

    def largest_results(self, count: int) -> list[Instruction]:
        """Return the executed instructions with the largest results in main memory."""
        found = [i for _, i in self.instructions() if not self._is_in_place(i)]
        return sorted(found, key=lambda i: -i.result_bytes)[:count]


@dataclasses.dataclass(frozen=True)
class _Update:
    """A buffer updated in place: its size and the part that is written."""

    buffer_bytes: int
    part_bytes: int


def short_source(source: str) -> str:
    """Return the telling end of a path of scopes.

    Example: "jit(f)/verify/Decoder/layers_3/mlp/dot_general" gives "verify/Decoder/layers_3/mlp".
    """
    parts = [part for part in source.split("/") if not part.startswith("jit(")]
    return "/".join(parts[:-1] or parts)


def _headers(text: str) -> Iterator[tuple[str, bool]]:
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header and not line.startswith(("HloModule", " ")):
            yield header[2], bool(header[1])


def _parse(text: str) -> Iterator[tuple[str, Computation]]:
    name, body = None, {}
    for line in text.splitlines():
        if line.startswith("}") and name is not None:
            yield name, Computation(name, body)
            name = None
        elif not line.startswith(" "):
            header = _COMPUTATION.match(line)
            if header and not line.startswith("HloModule"):
                name, body = header[2], {}
        elif name is not None:
            found = _INSTRUCTION.match(line)
            if found:
                body[found[2]] = _instruction(found[2], found[3], bool(found[1]))


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    shapes, rest = _split_shapes(text)
    opcode, _, after = rest.partition("(")
    arguments = after[: _closing(after)]
    branches = _BRANCHES.search(after)
    listed = _OPERAND.findall(branches[1]) if branches else []
    patterns = (_CALLS, _CYCLES, _SOURCE, _CONDITION)
    calls, cycles, source, condition = (pattern.search(after) for pattern in patterns)
    return Instruction(
        name=name,
        opcode=opcode.strip(),
        results=_own_results(opcode.strip(), [_array(m) for m in _ARRAY.finditer(shapes)]),
        operands=tuple(_OPERAND.findall(arguments)),
        runs=tuple(_RUNS.findall(after)) + tuple(listed),
        condition=condition[1] if condition else None,
        calls=calls[1] if calls else None,
        cycles=int(cycles[1]) if cycles else 0,
        source=source[1].replace("\\'", "'") if source else "",
        is_root=is_root,
        number=int(arguments) if re.fullmatch(r"-?\d{1,18}", arguments) else None,
    )


def _own_results(opcode: str, arrays: list[ArrayShape]) -> tuple[ArrayShape, ...]:
    """Leave out what the start of an operation lists beside its result: sources and handles."""
    if opcode == "copy-start":
        return tuple(arrays[:1])
    if opcode in ("all-gather-start", "collective-permute-start", "slice-start"):
        return tuple(arrays[1:2])
    return tuple(arrays)


def _split_shapes(text: str) -> tuple[str, str]:
    """Return the result's type and what follows; a tuple's type is in parentheses."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:].lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _closing(text: str) -> int:
    """Return where the parenthesis closes that was open before the text."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _array(match: re.Match) -> ArrayShape:
    dims = tuple(int(dim) for dim in match[2].split(",") if dim)
    layout = match[3] or ""
    return ArrayShape(match[1], dims, in_memory=re.search(r"S\([1-9]", layout) is None)


def _used_bytes(
    computations: dict[str, Computation], fused: Computation, index: int, whole: int
) -> int:
    """Return how much of a fusion's operand its insides use: parts only, where all users cut."""
    found = [
        i for i in fused.instructions.values() if i.opcode == "parameter" and i.number == index
    ]
    return _used_of(computations, fused, found[0], whole) if found else whole


def _used_of(
    computations: dict[str, Computation], fused: Computation, value: Instruction, whole: int
) -> int:
    used = whole if value.is_root else 0
    for user in fused.instructions.values():
        if value.name not in user.operands:
            continue
        inner = computations.get(user.calls or "")
        if user.opcode == "bitcast":
            used += _used_of(computations, fused, user, whole)
        elif user.opcode in _CUTTING:
            used += sum(array.num_bytes for array in user.results)
        elif user.opcode in _UPDATING and user.operands[0] == value.name:
            continue
        elif user.opcode == "fusion" and inner is not None:
            used += _used_bytes(computations, inner, user.operands.index(value.name), whole)
        else:
            return whole
    return min(used, whole)


def _updates(fused: Computation) -> list[_Update]:
    """Return the updates in place that are results of a fused computation."""
    root = fused.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    found = []
    for name in names:
        value = fused.instructions.get(name)
        while value is not None and value.opcode == "bitcast":
            value = fused.instructions.get(value.operands[0])
        if value is not None:
            found += _own_updates(fused, value)
    return found


def _own_updates(computation: Computation, value: Instruction) -> list[_Update]:
    if value.opcode not in _UPDATING:
        return []
    # (buffer, part, starts) and (buffer, indices, parts)
    part = computation.instructions[value.operands[1 if value.opcode == _UPDATING[0] else 2]]
    return [
        _Update(
            sum(array.num_bytes for array in value.results),
            sum(array.num_bytes for array in part.results),
        )
    ]
