"""`bench --target`: compile the decode step for absent hardware, print the compiler's account.

`experiments/aot` reads the compiled program itself: bytes moved, copies, time by part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from clover_jax.array_types import PyTree
from clover_jax.decoding.decode_states import cache_size, fitting_context, state_shapes
from clover_jax.decoding.models import Models, load_shapes
from clover_jax.decoding.programs import Options, Placement, options_for
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import speculate_and_verify
from clover_jax.errors import UserError
from clover_jax.evaluation.targets import Chip, Target, find_devices
from clover_jax.evaluation.work import count_work
from clover_jax.models.cache import key_values
from clover_jax.models.meshes import MeshShape, make_mesh, parse_mesh
from clover_jax.models.placement import (
    bytes_per_device,
    decode_state_shardings,
    param_shardings,
    with_shardings,
)
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.provenance import compiler_versions

GIGA = 1e9
# XLA's message for a program that is too large: the bytes that it would use, and the limit.
_FULL = re.compile(r"(?:Used|temporaries) \(?([\d.]+\w).*? (?:of|HBM) \(?([\d.]+\w)")


def compile_for(
    target: Target, lowered: Lowered, advice: str, options: Options | None = None
) -> tuple[Compiled, float]:
    """Compile a program and return it with the seconds that this took.

    Raises UserError, which ends in `advice`, if the compiler reports that it does not fit.
    """
    started = time.perf_counter()
    try:
        with _without_cache():
            settings: dict[str, Any] = {**(options or {})}
            compiled = lowered.compile(compiler_options=settings)
    except jax.errors.JaxRuntimeError as error:
        # Any other failure of the compiler is a bug and keeps its traceback.
        sizes = _FULL.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
            raise
        needed = f"it would need {sizes[1]} of {sizes[2]}, according to the compiler"
        raise UserError(
            f"the compiled step does not fit a device of {target.name}: {needed}; {advice}"
        ) from error
    return compiled, time.perf_counter() - started


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disable the cache on disk: programs for an absent target cannot be read from it again."""
    # jax makes the attributes of its config at import, so its stubs lack them.
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def account(compiled: Compiled, chip: Chip) -> dict[str, Any]:
    """Return what the compiler says of one device, as JSON values.

    flops and bytes_accessed count the body of a loop once; None without such an analysis.
    """
    memory: Any = compiled.memory_analysis()
    try:
        costs: Any = compiled.cost_analysis() or {}
    except Exception:  # not every compiler for absent devices has this analysis
        costs = {}

    # An output that takes the place of a donated argument needs no room of its own.
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    resident = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "resident_bytes": resident,
        "device_memory": chip.memory,
        "fits": resident <= chip.memory,
        "flops": costs.get("flops"),
        "bytes_accessed": costs.get("bytes accessed"),
    }


def account_lines(row: dict[str, Any]) -> list[str]:
    """Return the lines that show an `account`."""
    gb = {name: f"{n / GIGA:.2f}" for name, n in row.items() if name.endswith("_bytes")}
    accessed, flops = row["bytes_accessed"], row["flops"]
    lines = [
        f"memory of a device: {gb['resident_bytes']} of {row['device_memory'] / GIGA:.2f} GB, "
        f"{'fits' if row['fits'] else 'does not fit'} (arguments {gb['argument_bytes']}, outputs "
        f"{gb['output_bytes']} of which {gb['aliased_bytes']} reuse arguments, temporaries "
        f"{row['temporary_bytes'] / GIGA:.3f})"
    ]
    if accessed is not None and flops is not None:
        lines.append(
            f"cost analysis (the body of a loop counts once): {flops / GIGA:.0f} GFLOPs, "
            f"{accessed / GIGA:.2f} GB accessed"
        )
    return lines


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A decode step, ready for a target's compiler.

    weights, states: its arguments, as shapes with shardings. rows: of the batch on all devices.
    size: positions of a cache. floor_bytes: on one device, the weights once for every product that
    reads them and the live part of the caches; floor_seconds: for these and the products. It is
    not a lower bound: fast memory may keep a weight from one product to the next.
    """

    lowered: Lowered
    mesh: MeshShape
    weights: PyTree
    states: DecodeState
    rows: int
    size: int
    floor_bytes: float
    floor_seconds: float


def lower_step(
    models: Models, target: Target, mesh: str | None, batch: int, context: int
) -> LoweredStep:
    """Lower one step of `batch` rows with `context` committed positions.

    batch: rounded up until each device of the mesh has as many rows. mesh: as `--mesh`; None is
    one device.
    Raises UserError if the compiler is missing, or the mesh does not fit or has fsdp.
    """
    devices = find_devices(target)
    shape = MeshShape() if mesh is None else parse_mesh(mesh, len(devices))
    if shape.fsdp > 1:
        raise UserError(
            f"--mesh={mesh}: fsdp={shape.fsdp} is for training; a decode step splits its rows over "
            "data and its weights over tensor"
        )
    device_mesh = make_mesh(shape, devices)

    # The arguments, as the engine lays them out; buffers have room for one step.
    batch = Placement(device_mesh).whole_rows(batch)
    size = cache_size(models, context, room=0)
    states = state_shapes(models, batch, size)
    states = with_shardings(states, decode_state_shardings(states, device_mesh))
    weights = with_shardings(models.weights, param_shardings(models.weights, device_mesh))

    # With the engine's precision and donation.
    function = functools.partial(speculate_and_verify, models.step())
    with jax.set_mesh(device_mesh), exact_matmuls(str(models.dtype)):
        lowered = jax.jit(function, donate_argnums=1).trace(weights, states).lower()

    # Tensor splits the weights; devices along data have the same ones.
    work = count_work(function, weights, states, platform=target.platform)
    # Anything else that a head keeps is looked up, a few entries a step.
    caches = key_values((states.cache, states.draft_cache))
    floor = work.weight_bytes / shape.tensor + context / size * bytes_of(caches)
    seconds = target.chip.floor(floor, work.flops / shape.size)
    return LoweredStep(lowered, shape, weights, states, batch, size, floor, seconds)


def bytes_of(shapes: PyTree) -> int:
    """Return the bytes that one device holds of shapes with shardings."""
    return bytes_per_device(shapes, jax.tree.map(lambda leaf: leaf.sharding, shapes))


def compile_and_describe(
    target: Target, spec: ModelSpec, *, batch: int, context: int | None
) -> dict[str, Any]:
    """Compile the step, print the compiler's account, return it as JSON values.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `lower_step` and `compile_for` do.
    """
    # Shapes are enough: no weights are read or allocated.
    models = load_shapes(spec, target.platform)
    context = context or fitting_context(models, room=0)
    advice = "give a larger --mesh=tensor=N, a smaller --batch_size or --context, or --int8"
    with passing_note(f"compiling for {target.name}"):
        step = lower_step(models, target, spec.mesh, batch, context)
        compiled, seconds = compile_for(target, step.lowered, advice, options_for(target.platform))

    row = {
        "target": target.name,
        "devices": step.mesh.size,
        "rows": step.rows,
        "compile_seconds": seconds,
        "weight_bytes": bytes_of(step.weights),
        "cache_bytes": bytes_of((step.states.cache, step.states.draft_cache)),
        "floor_bytes": step.floor_bytes,
        "floor_seconds": step.floor_seconds,
        **account(compiled, target.chip),
    }
    if step.rows != batch:
        print(f"--batch_size={batch} is rounded up to {step.rows} rows, as many on each device")
    lines = [
        f"{target.name}, {step.mesh.size} x {target.chip.name}: compiled in {seconds:.0f} s",
        *account_lines(row),
        f"floor: {1e3 * step.floor_seconds:.2f} ms from the data sheet, for "
        f"{step.floor_bytes / GIGA:.2f} GB (each weight once for every product that reads it, and "
        "the live part of the caches)",
    ]
    print("\n".join(lines))

    # What was compiled, under the names of the flags, then the figures.
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
    return settings | row | {"versions": compiler_versions(target.platform)}
