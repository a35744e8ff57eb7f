"""Count the work of a traced program; compile the decode step for hardware that is not here.

Every product with a weight reads that weight: a matrix used by five draft levels is read five
times, as if no cache held it. Looking up rows (embeddings) is left out. A product of grouped rows
(experts) reads one matrix for each row, at most all. `experiments/aot` reads compiled programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core
from jax.interpreters import partial_eval
from jax.stages import Compiled, Lowered

from clover_jax.array_types import Params, PyTree
from clover_jax.decoding.engine import MOST_SNAPSHOTS
from clover_jax.decoding.models import Models, cache_size, fitting_context, idle_state, load_shapes
from clover_jax.decoding.programs import Options, Placement, options_for
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import speculate_and_verify
from clover_jax.errors import UserError
from clover_jax.evaluation.targets import Chip, Target, find_devices
from clover_jax.models.cache import delta_states, key_values
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

# These only rearrange or cut out: the product that uses the result reads that much of the weight.
_REARRANGING = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims"),
    *("reshape", "sharding_constraint", "slice", "squeeze", "transpose"),
}
_GROUPED = "ragged_dot_general"

GIGA = 1e9
# XLA's message for a program that is too large: the bytes that it would use, and the limit.
_FULL = re.compile(r"(?:Used|temporaries) \(?([\d.]+\w).*? (?:of|HBM) \(?([\d.]+\w)")


class Work(NamedTuple):
    """weight_bytes: read by products with weights. flops: of these. all_flops: of all products."""

    weight_bytes: float = 0.0
    flops: float = 0.0
    all_flops: float = 0.0


def count_work(
    function: Callable[..., Any],
    weights: Params,
    *arguments: Any,
    loop_trips: int = 1,
    platform: str | None = None,
) -> Work:
    """Return the work of `function(weights, *arguments)`; arrays or ShapeDtypeStructs.

    loop_trips: iterations of a loop whose count is data. Such loops read caches, no weights.
    platform: "cpu", "tpu" or "cuda"; None is the platform of this process.
    """
    jaxpr = jax.make_jaxpr(function)(weights, *arguments).jaxpr
    # The weights come first among the program's arguments.
    sizes = [np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weights)]
    sizes += [0] * (len(jaxpr.invars) - len(sizes))
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return _visit(jaxpr, sizes, loop_trips, platform or here)[0]


def _visit(jaxpr: core.Jaxpr, sizes: list[int], trips: int, platform: str) -> tuple[Work, list]:
    """Return the work, and the bytes at rest of an entry of each result.

    sizes: bytes at rest of an entry of each argument; 0 if it is not (a part of) a weight. At
        rest, because widening a weight for a product does not make it larger in memory.
    """
    # Compilers drop what no result needs, such as the gradient of a frozen matrix.
    needed = [True] * len(jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, needed, instantiate=True)
    at_rest: dict[Any, int] = dict(zip(jaxpr.invars, sizes, strict=True))

    def size_of(operand: Any) -> int:
        return 0 if isinstance(operand, core.Literal) else at_rest.get(operand, 0)

    totals = np.zeros(3)
    for equation in jaxpr.eqns:
        given = [size_of(operand) for operand in equation.invars]
        name, results = equation.primitive.name, [0] * len(equation.outvars)

        if name in ("dot_general", _GROUPED):
            totals += _product(equation, given)
        elif name in _REARRANGING:
            results = [given[0]] * len(results)
        elif name == "cond":  # its first operand selects the branch
            cost = [_visit(b, given[1:], trips, platform)[0] for b in _branches(equation, platform)]
            totals += np.max(cost, axis=0)
        else:
            times = {"scan": equation.params.get("length"), "while": trips}.get(name, 1)
            for inner in _inner(equation):
                is_call = name != "while" and len(inner.invars) == len(given)
                known = given if is_call else [0] * len(inner.invars)
                work, found = _visit(inner, known, trips, platform)
                totals += times * np.array(work)
                # What passes a weight on without computing keeps its size at rest.
                if is_call and name != "scan" and len(found) == len(results):
                    results = found

        at_rest.update(zip(equation.outvars, results, strict=True))
    return Work(*totals.tolist()), [size_of(var) for var in jaxpr.outvars]


def _product(equation: core.JaxprEqn, sizes: list[int]) -> Work:
    shapes: list[Any] = [operand.aval for operand in (*equation.invars, *equation.outvars)]
    left, right, *_, result = (array.shape for array in shapes)
    is_grouped = equation.primitive.name == _GROUPED
    numbers: Any = equation.params[
        "ragged_dot_dimension_numbers" if is_grouped else "dimension_numbers"
    ]
    (contracted, _), _ = numbers.dot_dimension_numbers if is_grouped else numbers

    # Each entry of the result sums over the contracted axes.
    inner = math.prod(left[axis] for axis in contracted)
    flops = 2.0 * math.prod(result) * inner
    if not any(sizes):
        return Work(all_flops=flops)
    entries = [math.prod(array.shape) for array in shapes[:-1]]
    if is_grouped:  # rows of one group read its matrix once
        entries[1] = entries[1] * min(left[0], right[0]) // right[0]
    read = sum(size * count for size, count in zip(sizes, entries, strict=True))
    return Work(float(read), flops, flops)


def _branches(equation: core.JaxprEqn, platform: str) -> list[core.Jaxpr]:
    """Return the branches of a cond that may run; of `platform_dependent` the platform's own."""
    branches = [branch.jaxpr for branch in equation.params["branches"]]
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return branches
    # The last one, for all other platforms, has no names.
    named = zip(branches, platforms, strict=True)
    return [next(branch for branch, names in named if names is None or platform in names)]


def _inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the programs that an equation calls, such as a jitted function's; most call none."""
    listed = [v for p in equation.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    # In jax 0.12 one class is both, so a closed one must not be counted as open again.
    return [
        v.jaxpr if isinstance(v, core.ClosedJaxpr) else v
        for v in listed
        if isinstance(v, core.ClosedJaxpr | core.Jaxpr)
    ]


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


def account(compiled: Compiled, chip: Chip, kept: int = 0) -> dict[str, Any]:
    """Return what the compiler says of one device, as JSON values.

    kept: bytes that a run keeps there besides what the program reads.
    flops and bytes_accessed count the body of a loop once; None without such an analysis.
    """
    memory: Any = compiled.memory_analysis()
    try:
        costs: Any = compiled.cost_analysis() or {}
    except Exception:  # not every compiler for absent devices has this analysis
        costs = {}

    names = {"argument": "argument", "output": "output", "aliased": "alias", "temporary": "temp"}
    sizes = {name: getattr(memory, f"{theirs}_size_in_bytes") for name, theirs in names.items()}
    # An output that takes the place of a donated argument needs no room of its own.
    resident = sum(sizes.values()) - 2 * sizes["aliased"] + kept
    return {
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "kept_bytes": kept,
        "resident_bytes": resident,
        "device_memory": chip.memory,
        "fits": resident <= chip.memory,
        "flops": costs.get("flops"),
        "bytes_accessed": costs.get("bytes accessed"),
    }


def account_lines(row: dict[str, Any]) -> list[str]:
    """Return the lines that show an `account`."""
    gb = {name: f"{n / GIGA:.2f}" for name, n in row.items() if name.endswith("_bytes")}
    kept = f", states of prompts {gb['kept_bytes']}" if row["kept_bytes"] else ""
    lines = [
        f"memory of a device: {gb['resident_bytes']} of {row['device_memory'] / GIGA:.2f} GB, "
        f"{'fits' if row['fits'] else 'does not fit'} (arguments {gb['argument_bytes']}, outputs "
        f"{gb['output_bytes']} of which {gb['aliased_bytes']} reuse arguments, temporaries "
        f"{row['temporary_bytes'] / GIGA:.3f}{kept})"
    ]

    # Not every compiler has these two.
    accessed, flops = row["bytes_accessed"], row["flops"]
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
    reads them, the live part of the caches, and the states of delta nets twice; floor_seconds: for
    these and the products. It is not a lower bound: fast memory may keep a weight from one product
    to the next.
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
    shape = MeshShape() if mesh is None else parse_mesh(mesh, target.num_chips)
    if shape.fsdp > 1:
        raise UserError(
            f"--mesh={mesh}: fsdp={shape.fsdp} is for training; a decode step splits its rows over "
            "data and its weights over tensor"
        )
    device_mesh = make_mesh(shape, find_devices(target, shape.size))

    # The arguments, as the engine lays them out; buffers have room for one step.
    batch = Placement(device_mesh).whole_rows(batch)
    size = cache_size(models, context, room=0)
    states = jax.eval_shape(functools.partial(idle_state, models, batch, size))
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
    floor += 2 * bytes_of(delta_states(states.cache))  # read and written at every step
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
        **account(
            compiled,
            target.chip,
            # So that prompts can go on where an earlier one was read to.
            kept=MOST_SNAPSHOTS * bytes_of(delta_states(step.states.cache)),
        ),
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
    settings = named_settings(models, spec) | {"dtype": spec.dtype, "mesh": spec.mesh}
    settings |= {"batch_size": batch, "context": context}
    return settings | row | {"versions": compiler_versions(target.platform)}


def named_settings(models: Models, spec: ModelSpec) -> dict[str, Any]:
    """Return the models under the names of the command's flags."""
    return {
        "base": spec.base,
        "draft": spec.draft,
        "tree": models.tree.name,
        "dtype": str(models.dtype),
        "int8": list(models.int8),
        "attention": models.attention,
    }
