"""What an instruction moves in main memory: parts of buffers where only parts are used."""

from __future__ import annotations

import dataclasses

from clover_jax.xla.hlo_text import Computation, Instruction

_CUTTING = {"dynamic-slice", "gather", "slice", "slice-start"}  # reads as much as it gives
_UPDATING = ("dynamic-update-slice", "scatter")  # in place, where the buffer was donated

Computations = dict[str, Computation]


def moved_bytes(
    computations: Computations, computation: Computation, instruction: Instruction
) -> int:
    """Return the bytes that an instruction of a computation reads and writes.

    An operand of which only a part is used (by a slice or a look-up in a fusion) counts as
    that part, and so does a buffer that is updated in place.
    """
    return _read_bytes(computations, computation, instruction) + written_bytes(
        computations, computation, instruction
    )


def written_bytes(
    computations: Computations, computation: Computation, instruction: Instruction
) -> int:
    """Return the bytes that an instruction writes to main memory."""
    fused = computations.get(instruction.calls or "")
    updates = _updates(fused) if fused else _own_updates(computation, instruction)
    whole = sum(update.buffer_bytes for update in updates)
    return max(instruction.result_bytes - whole, 0) + sum(u.part_bytes for u in updates)


def _read_bytes(
    computations: Computations, computation: Computation, instruction: Instruction
) -> int:
    fused = computations.get(instruction.calls or "")
    read = 0
    for index, name in enumerate(instruction.operands):
        operand = computation.instructions.get(name)
        if operand is None or not operand.results:
            continue
        size = operand.result_bytes
        if fused is not None:
            size = min(size, _used_bytes(computations, fused, index, size))
        elif instruction.opcode in _CUTTING:
            size = min(size, sum(array.num_bytes for array in instruction.results))
        elif instruction.opcode in _UPDATING and index == 0:
            size = 0
        read += size
    return read


def is_in_place(computations: Computations, instruction: Instruction) -> bool:
    """Return whether it writes into a buffer that was there before."""
    if instruction.opcode in _UPDATING:
        return True
    fused = computations.get(instruction.calls or "")
    return bool(fused and _updates(fused))


@dataclasses.dataclass(frozen=True)
class _Update:
    """A buffer updated in place: its size and the part that is written."""

    buffer_bytes: int
    part_bytes: int


def _used_bytes(computations: Computations, fused: Computation, index: int, whole: int) -> int:
    """Return how much of a fusion's operand its insides use: parts only, where all users cut."""
    found = [
        i for i in fused.instructions.values() if i.opcode == "parameter" and i.number == index
    ]
    return _used_of(computations, fused, found[0], whole) if found else whole


def _used_of(computations: Computations, fused: Computation, value: Instruction, whole: int) -> int:
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
