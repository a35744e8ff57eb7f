"""`python -m experiments.aot decode`: compile the decode step for a target and read the program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from clover_jax.array_types import PyTree
from clover_jax.decoding.models import Models, fitting_context, load_shapes
from clover_jax.decoding.programs import options_for
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import draft
from clover_jax.evaluation.compiled import bytes_of, count_work, lower_step
from clover_jax.evaluation.targets import Chip, Target
from clover_jax.models.cache import key_values
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.provenance import compiler_versions
from experiments.aot import costs
from experiments.aot.buffers import compile_with_buffers
from experiments.aot.hlo import Program
from experiments.aot.output_path import place_for

ADVICE = "give a larger --mesh=tensor=N, a smaller --batch_size or --context, or --int8"
GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's figures of one step, in bytes and seconds of one device.

    rows: of the batch on all devices; as many on each, as in the engine.
    temporary_bytes: allocated by the compiler; temporary_value_bytes: the part that values cover
        (see buffers.py).
    floor_bytes: as in `bench --target`: weights once for each product that reads them, and the live
        part of the caches. Not a lower bound: fast memory may keep a weight between two products.
    moved_bytes: read and written in main memory by the instructions of the program; loops over
        the cache count as often as they run, a prefetch counts once.
    counted_bytes: the compiler's own "bytes accessed" (prefetches twice, loops once), or None.
    estimated_seconds: sum of the compiler's cycle estimates at the chip's clock, or None.
    moved_by_part, seconds_by_part: the same two by stage of the step; the head's work is absorb
        and draft together.
    kernel_seconds_by_part: of Pallas kernels, which the estimate leaves out: the least time for the
        bytes that they move and the products that they declare, from the data sheet.
    draft_floor_bytes: of absorb and draft; 0 without a head.
    cache_copies, weight_copies: instructions that write a whole cache or a whole weight again.
    """

    target: str
    devices: int
    rows: int
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    temporary_value_bytes: int
    weight_bytes: int
    cache_bytes: int
    floor_bytes: float
    floor_seconds: float
    moved_bytes: float
    counted_bytes: float | None
    estimated_seconds: float | None
    moved_by_part: dict[str, float]
    seconds_by_part: dict[str, float] | None
    kernel_seconds_by_part: dict[str, float]
    draft_floor_bytes: float
    cache_copies: list[str]
    weight_copies: list[str]
    collectives: list[str]
    costly: list[str]
    largest: list[str]

    @property
    def moved_over_floor(self) -> float:
        """Bytes moved, in floors."""
        return self.moved_bytes / self.floor_bytes

    @property
    def counted_over_floor(self) -> float | None:
        """The compiler's count, in floors."""
        return None if self.counted_bytes is None else self.counted_bytes / self.floor_bytes

    def lines(self, chip: Chip) -> list[str]:
        """Return the figures for a reader."""
        # The new state takes the place of the old one, where they are aliased.
        resident = (
            self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes
        )
        # As shares of the weights' bytes, where a copy of a weight would show.
        temporaries = self.temporary_bytes / self.weight_bytes
        values = self.temporary_value_bytes / self.weight_bytes

        # Some compilers have neither a count nor an estimate.
        counted, estimate = self.counted_over_floor, self.estimated_seconds
        count = "" if counted is None else f" (the compiler counts {counted:.2f} x)"
        estimated = "" if estimate is None else f"; the compiler estimates {1e3 * estimate:.2f} ms"
        return [
            f"{self.target}, {self.devices} x {chip.name}: compiled in "
            f"{self.compile_seconds:.0f} s",
            f"memory a device: {resident / GIGA:.2f} of {chip.memory / GIGA:.0f} GB (weights "
            f"{self.weight_bytes / GIGA:.2f}, caches {self.cache_bytes / GIGA:.2f}, temporaries "
            f"{self.temporary_bytes / GIGA:.3f} or {temporaries:.1%} of the weights, their values "
            f"{values:.2%})",
            f"bytes moved: {self.moved_bytes / GIGA:.2f} GB, {self.moved_over_floor:.2f} x the "
            f"floor of {self.floor_bytes / GIGA:.2f} GB{count}",
            "(the floor has a weight once for every product that reads it, so it is no lower bound "
            "where fast memory keeps one)",
            f"floor {1e3 * self.floor_seconds:.2f} ms from the data sheet{estimated}",
            *self._kernel_lines(),
            *self._lines_by_part(),
            *costs.titled_lines(
                {
                    "copies of a cache": self.cache_copies,
                    "copies of a weight": self.weight_copies,
                    "collectives": self.collectives,
                    "most above the floor": self.costly,
                    "largest results": self.largest,
                }
            ),
        ]

    def _kernel_lines(self) -> list[str]:
        """Return lines for the kernels, which the estimate lacks."""
        # With XLA's own attention there are no kernels, and so nothing to add.
        kernels = self.kernel_seconds_by_part
        if not kernels:
            return []
        parts = ", ".join(f"{part} {1e3 * least:.2f} ms" for part, least in kernels.items())
        total = sum(kernels.values()) + (self.estimated_seconds or 0.0)
        return [
            f"kernels, which the estimate leaves out: at least {parts} from the data sheet; with "
            f"them {1e3 * total:.2f} ms"
        ]

    def _lines_by_part(self) -> list[str]:
        """Return bytes and estimate by stage, and the head's bytes against their floor."""
        # The compiler may give no estimate, or none for a part.
        seconds = self.seconds_by_part or {}
        parts = ", ".join(
            f"{part} {moved / GIGA:.2f} GB"
            + (f" and {1e3 * seconds[part]:.2f} ms" if part in seconds else "")
            for part, moved in self.moved_by_part.items()
        )
        if not self.draft_floor_bytes:
            return [f"by part: {parts}"]

        # The head's work is absorb and draft together; its floor counts both as well.
        head = sum(self.moved_by_part.get(part, 0.0) for part in ("absorb", "draft"))
        return [
            f"by part: {parts}",
            f"the head (absorb and draft): {head / GIGA:.2f} GB, "
            f"{head / self.draft_floor_bytes:.2f} x its floor of "
            f"{self.draft_floor_bytes / GIGA:.2f} GB",
        ]

    def to_row(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        counted = self.counted_over_floor
        return dataclasses.asdict(self) | {
            "moved_over_floor": round(self.moved_over_floor, 3),
            "counted_over_floor": counted and round(counted, 3),
            "temporaries_over_weights": round(self.temporary_bytes / self.weight_bytes, 4),
        }


def compile_and_describe(
    target: Target,
    spec: ModelSpec,
    *,
    batch: int,
    context: int | None,
    program: str | None = None,
) -> dict[str, Any]:
    """Compile the step, print the figures, return them as JSON values.

    context: None takes what fits, see `fitting_context`.
    program: a file for the compiled program's text.
    Raises UserError as `compile_step` does, and before compiling where there is no such folder.
    """
    # Mistakes first: compiling a large base takes minutes.
    path = None if program is None else place_for(program, "--program")
    # Shapes are enough: no weights are read or allocated.
    models = load_shapes(spec, target.platform)
    context = context or fitting_context(models, room=0)
    with passing_note(f"compiling for {target.name}"):
        step, text = compile_step(models, target, spec.mesh, batch, context)

    if step.rows != batch:
        print(f"--batch_size={batch} is rounded up to {step.rows} rows, as many on each device")
    print("\n".join(step.lines(target.chip)))
    # Printed by now, so that a full disk costs the program's text alone.
    if path is not None:
        path.write_text(text)

    # What was compiled, by the names of the flags; the figures come after it.
    settings = {
        "base": spec.base,
        "draft": spec.draft,
        "tree": models.tree.name,
        "dtype": spec.dtype,
        "int8": list(models.int8),
        "attention": models.attention,
        "mesh": spec.mesh,
        "batch_size": batch,
        "context": context,
    }
    return settings | step.to_row() | {"versions": compiler_versions(target.platform)}


def compile_step(
    models: Models, target: Target, mesh: str | None, batch: int, context: int
) -> tuple[CompiledStep, str]:
    """Compile one step of `batch` rows with `context` committed positions; return also its text.

    batch: rounded up until each device of the mesh has as many rows. mesh: as `--mesh`; None is
    one device.
    Raises UserError as `lower_step` and `compile_for` do.
    """
    # With the engine's options, or another program would be read.
    step = lower_step(models, target, mesh, batch, context)
    compiled = compile_with_buffers(target, step.lowered, ADVICE, options_for(target.platform))
    text: Any = compiled.program.as_text()

    # A program's text does not show how often it reads the live part of a cache.
    program, live = Program(text), context / step.size
    trips = functools.partial(costs.cache_turns, program, context)
    positions = costs.Live(live, step.size)
    moved = costs.moved_by_part(program, trips, positions)
    estimate = costs.estimated_seconds(program, target.chip, trips)
    caches = step.states.cache, step.states.draft_cache
    draft_floor = _draft_weight_bytes(models, step.weights, step.states, target.platform)

    memory: Any = compiled.program.memory_analysis()
    return CompiledStep(
        target=target.name,
        devices=step.mesh.size,
        rows=step.rows,
        compile_seconds=compiled.seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=compiled.temporaries.allocated,
        temporary_value_bytes=compiled.temporaries.filled,
        weight_bytes=bytes_of(step.weights),
        cache_bytes=bytes_of(caches),
        floor_bytes=step.floor_bytes,
        floor_seconds=step.floor_seconds,
        moved_bytes=sum(moved.values()),
        counted_bytes=costs.compilers_cost(compiled.program, "bytes accessed"),
        estimated_seconds=None if estimate is None else sum(estimate.values()),
        moved_by_part=moved,
        seconds_by_part=estimate,
        kernel_seconds_by_part=costs.kernel_seconds(program, target.chip, trips, positions),
        draft_floor_bytes=draft_floor / step.mesh.tensor
        + live * bytes_of(key_values(step.states.draft_cache)),
        cache_copies=costs.written_anew(program, caches),
        weight_copies=costs.written_anew(program, step.weights),
        collectives=costs.listed(program.collectives()),
        costly=costs.costly(program, target.chip, trips),
        largest=costs.largest(program),
    ), text


def _draft_weight_bytes(
    models: Models, weights: PyTree, states: DecodeState, platform: str
) -> float:
    """Return the bytes of weights that the head's products read."""
    if models.head is None:
        return 0.0

    # The head alone, because a count of the whole step does not show its part.
    def drafting(weights: PyTree, state: DecodeState) -> Any:
        return draft(models.step(), weights, state)

    return count_work(drafting, weights, states, platform=platform).weight_bytes
