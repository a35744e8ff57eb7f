"""Read a compiled program's temporaries from the compiler's own assignment of buffers.

XLA writes the assignment to the folder `xla_dump_to`. Two figures are only there:

- *Bytes allocated.* On TPU `memory_analysis().temp_size_in_bytes` counts the room between values
  twice. Arguments, the allocation and a few constants are the "Total bytes" of the compiler's
  memory report.
- *Bytes that values cover.* On TPU every scalar, and every index table of a prefetch or a loop, has
  16 KiB of main memory; a step of 32 layers has some thousand of them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax.stages import Compiled, Lowered

from clover_jax.decoding.programs import Options
from clover_jax.evaluation.compiled import compile_for
from clover_jax.evaluation.targets import Target

# "allocation 5: size 4096, preallocated-temp:", then a line for each value that lies in it. An
# allocation with a color is not in main memory. From jax 0.12 on a page stands behind the size.
_TEMPORARIES = re.compile(
    r"^allocation \d+: size (\d+),(?: page \d+,)? preallocated-temp:\n((?: value:.*\n)*)", re.M
)
_VALUE = re.compile(r"\(size=(\d+),offset=(\d+)\)")


class Temporaries(NamedTuple):
    """Bytes of main memory: allocated, and of these the bytes that a value covers."""

    allocated: int
    filled: int


class CompiledProgram(NamedTuple):
    """A program, the seconds that it took to compile, and its temporaries.

    Without an assignment of buffers, both of these are the bytes of `memory_analysis()`.
    """

    program: Compiled
    seconds: float
    temporaries: Temporaries

    @property
    def resident_bytes(self) -> int:
        """The most that a device holds at one time."""
        memory: Any = self.program.memory_analysis()
        # An output that takes the place of an argument needs no room of its own.
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + new + self.temporaries.allocated


def compile_with_buffers(
    target: Target, lowered: Lowered, advice: str, options: Options | None = None
) -> CompiledProgram:
    """Compile without the cache on disk, which keeps no dumps, and read the sizes of the buffers.

    Raises UserError as `compile_for` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        dumped = {**(options or {}), "xla_dump_to": folder}
        compiled, seconds = compile_for(target, lowered, advice, dumped)
        temporaries = read_temporaries(Path(folder))

    if temporaries is None:
        memory: Any = compiled.memory_analysis()
        counted = memory.temp_size_in_bytes
        temporaries = Temporaries(allocated=counted, filled=counted)
    return CompiledProgram(compiled, seconds, temporaries)


def read_temporaries(folder: Path) -> Temporaries | None:
    """Return the temporaries of the programs whose assignments lie in the folder; None without."""
    texts = [path.read_text() for path in folder.glob("*after_optimizations-buffer-assignment.txt")]
    if not texts:
        return None
    blocks = [block for text in texts for block in _TEMPORARIES.findall(text)]
    spans = [
        [(int(offset), int(size)) for size, offset in _VALUE.findall(values)]
        for _, values in blocks
    ]
    return Temporaries(
        allocated=sum(int(size) for size, _ in blocks), filled=sum(map(_covered, spans))
    )


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return the number of bytes that lie in at least one span (offset, size).

    Example: (0, 4), (2, 4) and (8, 1) cover 7.
    """
    # By offset, so that only the furthest end so far can overlap the next span.
    covered = end = 0
    for offset, size in sorted(spans):
        covered += max(0, offset + size - max(end, offset))
        end = max(end, offset + size)
    return covered
