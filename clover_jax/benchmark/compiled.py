"""Compile the decode step for hardware that is not here and report what it will do."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from clover_jax.array_types import PyTree
from clover_jax.decoding.compiler_options import options_for
from clover_jax.decoding.placement import Placement
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import absorb_and_draft, roots, speculate_and_verify
from clover_jax.errors import UserError
from clover_jax.loading.subject import Subject, cache_size, state_shapes
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.sharding.device_bytes import bytes_per_device
from clover_jax.sharding.meshes import MeshShape, make_mesh, parse_mesh
from clover_jax.sharding.placement import decode_state_shardings, param_shardings, with_shardings
from clover_jax.xla import program_figures as figures
from clover_jax.xla.buffers import compile_with_buffers
from clover_jax.xla.hlo import Program
from clover_jax.xla.hlo_parts import sum_by_part
from clover_jax.xla.targets import Target, find_devices
from clover_jax.xla.work import count_work

DRAFTING = ("absorb", "draft")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one step; bytes and seconds are those of one device.

    rows: of the batch, all devices together; as many on each, as in the engine.
    temporary_bytes: what the compiler allocates; temporary_value_bytes: of that, what values lie on
        (see buffers.py).
    floor_bytes: weights that products read, as often as they do, and the live part of the caches.
    moved_bytes: read and written in main memory by the instructions of the program; loops over
        the cache count as often as they run. A prefetch counts once.
    counted_bytes: the compiler's own "bytes accessed" (prefetches twice, loops once); None where
        it gives none.
    estimated_seconds: sum of its cycle estimates at the chip's clock; None where it gives none.
    moved_by_part, seconds_by_part: the same two by part of the step; what the head does is absorb
        and draft together.
    draft_floor_bytes: of these two parts; 0 without a head.
    cache_copies, weight_copies: instructions that write a whole cache or a whole weight anew.
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
    def draft_bytes(self) -> float:
        """What the head moves: absorbing and all levels of the tree."""
        return sum(self.moved_by_part.get(part, 0.0) for part in DRAFTING)

    @property
    def counted_over_floor(self) -> float | None:
        """The compiler's count, in floors."""
        return None if self.counted_bytes is None else self.counted_bytes / self.floor_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        ratios = {
            "moved_over_floor": round(self.moved_over_floor, 3),
            "counted_over_floor": self.counted_over_floor and round(self.counted_over_floor, 3),
            "temporaries_over_weights": round(self.temporary_bytes / self.weight_bytes, 4),
        }
        return dataclasses.asdict(self) | ratios


def compile_step(
    subject: Subject, target: Target, mesh: str | None, batch: int, context: int
) -> tuple[CompiledStep, str]:
    """Compile one step of `batch` rows with `context` committed positions for the target.

    batch: made more where the mesh splits rows, until each device has as many.
    mesh: as `--mesh`; None is one device. The second result is the program's text.
    Raises UserError where the compiler is missing, or the mesh does not fit or has fsdp.
    """
    devices = find_devices(target)
    shape = MeshShape() if mesh is None else parse_mesh(mesh, len(devices))
    if shape.fsdp > 1:
        raise UserError(
            f"--mesh={mesh}: fsdp={shape.fsdp} is for training; a decode step splits its rows over "
            "data and its weights over tensor"
        )
    device_mesh = make_mesh(shape, devices)
    batch = Placement(device_mesh).whole_rows(batch)
    size = cache_size(subject, context, room=0)
    config, states = subject.step(), state_shapes(subject, batch, size)
    weight_places = param_shardings(subject.weights, device_mesh)
    state_places = decode_state_shardings(states, device_mesh)
    weights = with_shardings(subject.weights, weight_places)
    step = jax.jit(functools.partial(speculate_and_verify, config), donate_argnums=1)
    with jax.set_mesh(device_mesh), exact_matmuls(str(subject.dtype)):
        lowered = step.trace(weights, with_shardings(states, state_places)).lower()
        compiled = compile_with_buffers(lowered, options_for(target.platform))
    work = count_work(functools.partial(speculate_and_verify, config), weights, states)
    caches = (states.cache, states.draft_cache)
    cache_bytes = bytes_per_device(caches, decode_state_shardings(caches, device_mesh))
    floor_bytes = work.weight_bytes / shape.tensor + cache_bytes * context / size
    draft_cache = bytes_per_device(states.draft_cache, state_places.draft_cache)
    draft_floor = _draft_weight_bytes(subject, weights, states) / shape.tensor
    text = compiled.program.as_text()
    program = Program(text)
    memory = compiled.program.memory_analysis()
    trips = functools.partial(figures.cache_turns, program, context)
    moved = sum_by_part(
        program,
        lambda where, one: program.moved_bytes(where, one) * figures.times(program, where, trips),
    )
    estimate = figures.estimated_seconds(program, target.chip, trips)
    result = CompiledStep(
        target=target.name,
        devices=shape.size,
        rows=batch,
        compile_seconds=compiled.seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=compiled.temporaries.allocated,
        temporary_value_bytes=compiled.temporaries.filled,
        weight_bytes=bytes_per_device(subject.weights, weight_places),
        cache_bytes=cache_bytes,
        floor_bytes=floor_bytes,
        floor_seconds=target.chip.floor(floor_bytes, work.flops / shape.size),
        moved_bytes=sum(moved.values()),
        counted_bytes=figures.compilers_cost(compiled.program, "bytes accessed"),
        estimated_seconds=estimate and sum(estimate.values()),
        moved_by_part=moved,
        seconds_by_part=estimate,
        draft_floor_bytes=draft_floor + draft_cache * context / size,
        cache_copies=figures.written_anew(
            program, caches, decode_state_shardings(caches, device_mesh)
        ),
        weight_copies=figures.written_anew(program, subject.weights, weight_places),
        collectives=figures.listed(program.collectives()),
        costly=figures.costly(program, target.chip, trips),
        largest=figures.largest(program),
    )
    return result, text


def _draft_weight_bytes(subject: Subject, weights: PyTree, states: DecodeState) -> float:
    """Return what the head's products read of weights."""
    if subject.head is None:
        return 0.0

    def drafting(weights: PyTree, state: DecodeState) -> Any:
        return absorb_and_draft(subject.step(), weights, state, roots(state))

    return count_work(drafting, weights, states).weight_bytes
