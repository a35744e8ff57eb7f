"""Read a compiled program's temporaries from the compiler's own assignment of buffers.

XLA writes the assignment to the folder `xla_dump_to`. It has two figures that `memory_analysis()`
has not:

- *Bytes allocated.* A TPU's compiler adds the room between values to the allocation that contains
  it already, and calls the sum `temp_size_in_bytes`. Arguments, the allocation and a few constants
  are the "Total bytes" of its memory report, without that sum.
- *Bytes that values cover.* It gives every scalar, and every index table of a prefetch or a loop,
  16 KiB of main memory; a step of 32 layers has some thousand of them.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from clover_jax.decoding.programs import Options

# "allocation 5: size 4096, preallocated-temp:", then a line for each value that lies in it. An
# allocation with a color is not in main memory. From jax 0.12 on a page stands behind the size.
_TEMPORARIES = re.compile(
    r"^allocation \d+: size (\d+),(?: page \d+,)? preallocated-temp:\n((?: value:.*\n)*)", re.M
)
_VALUE = re.compile(r"\(size=(\d+),offset=(\d+)\)")


class Temporaries(NamedTuple):
    """Bytes of main memory: those allocated, and those of them that a value covers."""

    allocated: int
    filled: int


class CompiledProgram(NamedTuple):
    """A program, the seconds that it took to compile, and its temporaries.

    Where the compiler wrote no assignment, all that `memory_analysis()` counts passes for filled.
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


def compile_with_buffers(lowered: Lowered, options: Options | None = None) -> CompiledProgram:
    """Compile, anew even where a cache has it, and read the sizes of its buffers."""
    # A program from the cache has left no assignment in the folder.
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        started = time.perf_counter()
        # The compiler writes its assignment of buffers there, among other dumps.
        settings: dict[str, Any] = {**(options or {}), "xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=settings)
        seconds = time.perf_counter() - started
        temporaries = read_temporaries(Path(folder))

    if temporaries is None:
        memory: Any = compiled.memory_analysis()
        counted = memory.temp_size_in_bytes
        temporaries = Temporaries(allocated=counted, filled=counted)
    return CompiledProgram(compiled, seconds, temporaries)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Leave the cache on disk alone: programs for another target cannot be read from it again."""
    # jax makes the attributes of its config at import, so its stubs lack them.
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


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
