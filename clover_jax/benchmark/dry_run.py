"""`train --dry_run`: parameters, memory of each device, operations and time of a training run.

Everything comes from shapes: the base's config is read, and nothing is allocated. Params, optimiser
and gradients are counted exactly. Activations are estimated from the largest arrays that live
together, since the compiler chooses how many do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.benchmark.compiled_training import CompiledTraining, compile_training_step
from clover_jax.benchmark.step_shapes import StepShapes, gigabytes, step_shapes
from clover_jax.drafters.drafter import DRAFT_ROWS
from clover_jax.errors import UserError
from clover_jax.pretrained.shapes import cast_shapes
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note, say
from clover_jax.sharding.device_bytes import bytes_per_device, gathered_bytes, whole_over_rows
from clover_jax.sharding.meshes import AnyMesh, MeshShape, make_abstract_mesh, parse_mesh
from clover_jax.sharding.placement import param_shardings
from clover_jax.storage.files import place_for
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import check_rows
from clover_jax.training.step import train_step
from clover_jax.xla.targets import NoCompiler, Target
from clover_jax.xla.work import count_flops

# Share of the data sheet's rate that well-tuned training reaches, so the time is a hopeful one.
UTILISATION = 0.4
# A CPU's programs fuse less: they keep both factors of a gate and every step of a norm. Only CPUs
# do not say how much memory they have.
ON_A_CPU = "activations are estimated as for an accelerator; CPUs took 0.9 to 1.6 times as much"
AT_REST = ("base", "draft", "optimiser")  # on a device between steps


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The figures of a dry run.

    bytes_per_device: by kind; gathered: copies of weights, where the dtype of the step or fsdp
        needs them: at one time the base's vocabulary and two layers, and the whole draft.
    device_memory: of each device; None where it is not known.
    seconds: at UTILISATION of the device's matrix rate; None where that is not known.
    """

    mesh: MeshShape
    base_params: int
    draft_params: int
    bytes_per_device: dict[str, int]
    device_memory: float | None
    flops_per_step: float
    tokens_per_step: int
    steps: int
    seconds: float | None

    @property
    def total_bytes(self) -> int:
        """Bytes of a device in all."""
        return sum(self.bytes_per_device.values())

    def check_memory(self, at_rest: bool = False) -> None:
        """Raise UserError where a device's memory is known and too small.

        at_rest: count only what lies there between steps.
        """
        parts = {k: n for k, n in self.bytes_per_device.items() if k in AT_REST or not at_rest}
        needed = sum(parts.values())
        if self.device_memory is None or needed <= self.device_memory:
            return

        # Advice follows the kind that takes most.
        largest = max(parts, key=lambda kind: parts[kind])
        advice = {
            "base": "split the base over more devices by fsdp or tensor",
            "activations": "give a smaller --batch_size or --seq_len, more devices, more "
            "--gradient_accumulation_steps, or --remat",
        }
        raise UserError(
            f"a device would need {gigabytes(needed)} and has "
            f"{gigabytes(self.device_memory)}; the largest part is {largest} with "
            f"{gigabytes(self.bytes_per_device[largest])}: "
            f"{advice.get(largest, 'split it over more devices by fsdp')}"
        )

    def lines(self) -> list[str]:
        """Return the figures for a reader."""
        of, estimated = "", ON_A_CPU
        if self.device_memory is not None:
            of, estimated = f" of {gigabytes(self.device_memory)}", "activations are estimated"
        parts = ", ".join(f"{kind} {gigabytes(n)}" for kind, n in self.bytes_per_device.items())
        tokens = self.tokens_per_step * self.steps
        # The rate is known of targets only.
        if self.seconds is None:
            time = "time: unknown for this device; give --target for another"
        else:
            time = (
                f"time: {self.seconds / 3600:.2f} hours, {self.seconds / self.steps:.3g} s a step, "
                f"if {UTILISATION:.0%} of the device's matrix rate is reached"
            )

        return [
            f"mesh {self.mesh}: {self.mesh.size} device{'s' if self.mesh.size > 1 else ''}",
            f"params: base {self.base_params:,}, draft {self.draft_params:,}",
            f"memory a device: {gigabytes(self.total_bytes)}{of} ({parts}; {estimated})",
            f"work: {self.flops_per_step:.3g} FLOPs a step, {self.steps:,} steps of "
            f"{self.tokens_per_step:,} tokens, {tokens:.3g} tokens in all",
            time,
        ]

    def to_row(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        row = dataclasses.asdict(self) | {"mesh": str(self.mesh), "total_bytes": self.total_bytes}
        return {"dry_run": True} | row


def dry_run(settings: TrainSettings, mesh: str | None, target: Target | None = None) -> DryRun:
    """Return what a run with these settings would take.

    mesh: as `--mesh`; it may have more devices than there are here. target: the hardware, else the
        devices of this process.
    Raises UserError for settings that cannot work.
    """
    # Settings that cannot work are refused before anything is traced.
    shape = _mesh_shape(mesh, target)
    placed = make_abstract_mesh(shape)
    check_rows(settings, placed)
    step = step_shapes(settings, _dtype(settings, target))

    one_step = functools.partial(train_step, step.config)
    flops = count_flops(
        one_step,
        step.state,
        step.base,
        step.batch,
        loop_trips=step.trips(),
        platform=target.platform if target else None,
    )

    # The kinds in the order in which the report lists them.
    kinds = {"base": step.base, "draft": step.state.params, "optimiser": step.state.opt_state}
    # Bytes as the params lie on the mesh between steps.
    sizes = {
        kind: bytes_per_device(tree, param_shardings(tree, placed)) for kind, tree in kinds.items()
    }
    # Gradients are float32 like the draft's params, and split as they are.
    sizes["gradients"] = sizes["draft"]
    sizes["gathered"] = gathered_bytes(step.base, placed) + _copied_draft_bytes(step, placed)
    sizes["activations"] = step.activation_bytes(shape)

    rate = target.chip.matrix_rate if target else None
    return DryRun(
        mesh=shape,
        # Less the copy of lm_head's rows that a reduced vocabulary drafts with.
        base_params=_count({k: v for k, v in step.base.items() if k != DRAFT_ROWS}),
        draft_params=_count(step.state.params),
        bytes_per_device=sizes,
        device_memory=target.chip.memory if target else _memory_here(),
        flops_per_step=flops,
        tokens_per_step=settings.batch_size * settings.seq_len,
        steps=settings.steps,
        seconds=settings.steps * flops / (shape.size * rate * UTILISATION) if rate else None,
    )


def _copied_draft_bytes(step: StepShapes, mesh: AnyMesh) -> int:
    """Return the bytes of the draft that a step holds beside its own float32 params."""
    dtype = jax.tree.leaves(step.base)[0].dtype
    if mesh.shape["fsdp"] == 1 and dtype == jnp.float32:
        return 0  # neither gathered nor cast
    return whole_over_rows(cast_shapes(step.state.params, dtype), mesh)


def dry_run_compiled(
    settings: TrainSettings, dry: DryRun, target: Target, program: str | None = None
) -> CompiledTraining | None:
    """Compile the step of a dry run for its target; None, said on stderr, without the compiler.

    program: a file for the compiled program's text. Raises UserError where a device is too small
    for what lies there between steps, where the compiler says that the step does not fit, or where
    there is no folder for `program`.
    """
    place = None if program is None else place_for(program, "--program")
    dry.check_memory(at_rest=True)  # before minutes of compilation
    step = step_shapes(settings, _dtype(settings, target))
    try:
        with passing_note(f"compiling for {target.name}"):
            compiled, text = compile_training_step(step, dry.mesh, target)
    except NoCompiler as error:
        say(f"figures are computed only: {error}")
        return None

    if place is not None:
        place.write_text(text)
    return compiled


def _count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _mesh_shape(mesh: str | None, target: Target | None) -> MeshShape:
    if target is None or target.platform != "tpu":
        # More devices than are here may be named, but the rest (-1) is of those that are.
        count = len(jax.devices()) if mesh and "-1" in mesh else None
        return parse_mesh(mesh, count) if mesh else MeshShape()
    # A TPU's topology has all of its chips; by default fsdp takes them.
    chips = math.prod(int(n) for n in target.topology.partition(":")[2].split("x"))
    return parse_mesh(mesh or "fsdp=-1", chips)


def _dtype(settings: TrainSettings, target: Target | None) -> jnp.dtype:
    # "auto" asks the device, and a target is not here: accelerators compute in bfloat16.
    is_elsewhere = target is not None and settings.dtype == "auto"
    return jnp.dtype("bfloat16") if is_elsewhere else resolve_dtype(settings.dtype)


def _memory_here() -> float | None:
    """Return the memory of this process's devices; None on CPU, where it is not known."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")
