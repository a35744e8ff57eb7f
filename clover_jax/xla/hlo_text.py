"""The text of a compiled program, read: computations, their instructions, the arrays these make."""

from __future__ import annotations

import dataclasses
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
CONTROL = {"call", "conditional", "while"}  # what they run is counted in its own place
_ENDS = ("-done", "-update")  # of an operation that was counted when it started
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
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


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
    channel: of a collective; the parts of one that runs beside other work share it.
    trips: of a loop, where the compiler says it.
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
    entry = next(name for name, is_entry in _headers(text) if is_entry)
    return dict(_computations(text)), entry


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


def _computations(text: str) -> Iterator[tuple[str, Computation]]:
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
    channel, trips = _CHANNEL.search(after), _TRIPS.search(after)
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
        channel=int(channel[1]) if channel else None,
        trips=int(trips[1]) if trips else None,
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
