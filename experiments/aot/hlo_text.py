"""Parse the text of a compiled program: computations, instructions, and the arrays they make."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple

# These do no work: their result is their operands' memory under another name.
_ALIASES = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "tuple",
}
CONTROL = {"call", "conditional", "while"}  # the computations that they run are counted themselves
_ENDS = ("-done", "-update")  # of operations that were counted when they started
_BITS = {"f8e4m3fn": 8, "f8e5m2": 8}  # other names end in their bits

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
# As in bf16[8,128]{1,0:T(8,128)}: dtype, sizes, layout.
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_RUNS = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# A kernel's own, as `pl.CostEstimate` states it: the compiler has no cycles for one.
_DECLARED = re.compile(
    r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"\d+","bytes_accessed":"(\d+)"'
)
_SOURCE = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_WHOLE = re.compile(r"-?\d{1,18}")


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
        """Its size; a truth value takes a byte."""
        # bf16 has 16; pred, a truth value, names no number.
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype) or 8)
        return math.prod(self.dims) * bits // 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes without ones, sorted: the same for every layout and transposition."""
        return tuple(sorted(dim for dim in self.dims if dim > 1))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Declared(NamedTuple):
    """The work that a kernel says it does."""

    flops: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    operands: names, in the same computation.
    runs: the computations that control flow runs; condition: that of a loop.
    calls: the fused computation of a fusion.
    cycles: the compiler's estimate; 0 where it gives none.
    source: the path of named scopes.
    number: the index of a parameter, the value of a whole constant.
    channel: of a collective; its parts share it where it runs beside other work.
    trips: of a loop; None where the compiler does not say it.
    crosses_calls: whether the call before has already fetched its result into fast memory.
    declared: of a kernel that declares its work.
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
    channel: int | None = None
    trips: int | None = None
    crosses_calls: bool = False
    declared: Declared | None = None

    @property
    def body(self) -> str:
        """The computation that a loop repeats."""
        return next((name for name in self.runs if name != self.condition), self.runs[0])

    @property
    def is_free(self) -> bool:
        """Whether it moves nothing by itself."""
        return self.opcode in _ALIASES | CONTROL or self.opcode.endswith(_ENDS)

    @property
    def result_bytes(self) -> int:
        """Bytes of its results in main memory."""
        return sum(array.num_bytes for array in self.results if array.in_memory)

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.results))
        return f"{self.opcode} {shapes} ({short_source(self.source)})"


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The one whose result is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", None

    for line in text.splitlines():
        # A line is an instruction of the last header's computation, a header, or neither.
        instruction = _INSTRUCTION.match(line) if current else None
        if instruction:
            name = instruction[2]
            current.instructions[name] = _instruction(name, instruction[3], bool(instruction[1]))

        # Only headers and closing braces stand at the margin, and tables of source lines.
        elif not line.startswith((" ", "HloModule")):
            header, current = _COMPUTATION.match(line), None
            if header:
                current = computations[header[2]] = Computation(header[2], {})
                entry = current.name if header[1] else entry

    return computations, entry


def short_source(source: str) -> str:
    """Return a path of scopes without the jitted functions around and the operation at the end.

    Example: "jit(f)/verify/Decoder/layers_3/mlp/dot_general" gives "verify/Decoder/layers_3/mlp".
    """
    parts = [part for part in source.split("/") if not part.startswith("jit(")]
    return "/".join(parts[:-1] or parts)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    # TYPE opcode(operands), attribute=value, ...
    shapes, rest = _split_shapes(text)
    opcode, _, after = rest.partition("(")
    opcode = opcode.strip()
    arguments = after[: _closing(after)]

    def attribute(pattern: re.Pattern) -> str | None:
        match = pattern.search(after)
        return match[1] if match else None

    def number(pattern: re.Pattern) -> int | None:
        digits = attribute(pattern)
        return None if digits is None else int(digits)

    declared = _DECLARED.search(after)
    # A conditional lists its branches by themselves, or names the two of a truth value.
    branches = _OPERAND.findall(attribute(_BRANCHES) or "")
    return Instruction(
        name=name,
        opcode=opcode,
        results=_own_results(opcode, [_array(match) for match in _ARRAY.finditer(shapes)]),
        operands=tuple(_OPERAND.findall(arguments)),
        runs=(*_RUNS.findall(after), *branches),
        condition=attribute(_CONDITION),
        calls=attribute(_CALLS),
        cycles=number(_CYCLES) or 0,
        # Apostrophes are escaped in the text.
        source=(attribute(_SOURCE) or "").replace("\\'", "'"),
        is_root=is_root,
        number=int(arguments) if _WHOLE.fullmatch(arguments) else None,
        channel=number(_CHANNEL),
        trips=number(_TRIPS),
        crosses_calls="cross_program_prefetch_index=" in after,
        declared=None if declared is None else Declared(int(declared[1]), int(declared[2])),
    )


def _own_results(opcode: str, arrays: list[ArrayShape]) -> tuple[ArrayShape, ...]:
    """Leave out what the start of an operation lists beside its result: sources and handles."""
    if opcode == "copy-start":
        return tuple(arrays[:1])
    if opcode in ("collective-permute-start", "slice-start"):
        return tuple(arrays[1:2])
    if opcode == "all-gather-start":  # of several arrays at once: first what is sent of each
        return tuple(arrays[len(arrays) // 2 :])
    return tuple(arrays)


def _split_shapes(text: str) -> tuple[str, str]:
    """Return the result's type and what follows; a tuple's type is in parentheses."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:].lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _closing(text: str) -> int:
    """Return the index at which a parenthesis closes that was open before the text."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _array(match: re.Match) -> ArrayShape:
    dims = tuple(int(dim) for dim in match[2].split(",") if dim)
    layout = match[3] or ""
    # A layout names the memory space, as in {1,0:T(8,128)S(1)}; main memory is 0 and not named.
    return ArrayShape(match[1], dims, in_memory=re.search(r"S\([1-9]", layout) is None)
