"""What a program's temporaries hold, by the compiler's own assignment of buffers.

A TPU's compiler gives every scalar, and every index table of a prefetch or a loop, 16 KiB of main
memory; a step of 32 layers has some 3 000 of them. How much of its temporaries tensors fill is not
in `memory_analysis()`, but in the assignment, which XLA writes to the folder `xla_dump_to`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from clover_jax.decoding.compiler_options import Options

# "allocation 5: size 4096, preallocated-temp:", then a line for each value that lies in it. An
# allocation with a color is not in main memory.
_TEMPORARIES = re.compile(
    r"^allocation \d+: size \d+, preallocated-temp:\n((?: value:.*\n)*)", re.M
)
_VALUE = re.compile(r"\(size=(\d+),offset=(\d+)\)")


def written_to(folder: Path) -> Options:
    """Return the compiler options for `filled_bytes` of the folder."""
    return {"xla_dump_to": str(folder)}


def filled_bytes(folder: Path) -> int | None:
    """Return the bytes of main memory that the only program's temporary values lie on.

    None where the compiler wrote no assignment.
    """
    found = [path.read_text() for path in folder.glob("*after_optimizations-buffer-assignment.txt")]
    return sum(map(_filled, found)) if found else None


def _filled(assignment: str) -> int:
    blocks = _TEMPORARIES.findall(assignment)
    return sum(_covered((int(o), int(n)) for n, o in _VALUE.findall(block)) for block in blocks)


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many bytes lie in at least one span (offset, size).

    Example: (0, 4), (2, 4) and (8, 1) cover 7.
    """
    covered = end = 0
    for offset, size in sorted(spans):
        covered += max(0, offset + size - max(end, offset))
        end = max(end, offset + size)
    return covered
