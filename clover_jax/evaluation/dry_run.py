"""`train --dry_run`: parameters, memory of each device, operations and time of a training run.

Everything comes from shapes: the base's config is read, and nothing is allocated. Params, optimizer
and gradients are counted exactly. Activations are estimated from the largest arrays that live
together; a target whose compiler is installed has the compiler's own account instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from clover_jax.array_types import Params
from clover_jax.checkpoints.loading import describe_base
from clover_jax.checkpoints.shapes import base_shapes, cast_shapes
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import DRAFT_ROWS, with_draft_rows
from clover_jax.errors import UserError
from clover_jax.evaluation.compiled import account, account_lines, compile_for, count_work
from clover_jax.evaluation.targets import NoCompiler, Target, find_devices
from clover_jax.models.batch import Batch
from clover_jax.models.meshes import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from clover_jax.models.placement import (
    bytes_per_device,
    gathered_bytes,
    param_shardings,
    row_shardings,
    whole_over_rows,
    with_shardings,
)
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note, say
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import check_rows, make_head, pipeline_config, step_config
from clover_jax.training.step import (
    TrainState,
    TrainStepConfig,
    init_state,
    make_train_step,
    train_step,
)
from clover_jax.training.teacher import stored_names

# Share of the data sheet's rate that well-tuned training reaches, so the time is optimistic.
UTILIZATION = 0.4
# A CPU's programs fuse less. Only CPUs do not report how much memory they have.
ON_A_CPU = "activations are estimated as for an accelerator; CPUs took 0.9 to 1.6 times as much"
AT_REST = ("base", "draft", "optimizer")  # on a device between steps
COMPILED_ADVICE = (
    "give more devices, a smaller --batch_size, more --gradient_accumulation_steps, or --remat"
)
FLOAT32 = 4  # bytes


class StepShapes(NamedTuple):
    """The arguments of `train_step`, as ShapeDtypeStructs."""

    config: TrainStepConfig
    state: TrainState
    base: Params
    batch: Batch

    def trips(self, row_shards: int = 1) -> int:
        """Return the chunks of the loss, of one part of a batch, if all positions are targets.

        row_shards: devices that share the rows, each with chunks of its own.
        """
        rows, size = self.batch.tokens.shape
        targets = rows * size // (self.config.accumulation_steps * row_shards)
        return math.ceil(targets / min(self.config.loss_chunk, targets))

    def activation_bytes(self, mesh: MeshShape) -> int:
        """Estimate the bytes of a device's activations at their largest.

        For an 8B base a dry run gave 1 to 1.3 times the total of the compilers for TPU. The one for
        CPU took 1.5 times these activations for Clover-2 (1.76 GB, snakes5m, 16 x 512), 1.6 times
        on builtin:tiny (8 x 512), 0.9 times for Medusa (snakes5m).
        """
        config, layer = self.config, self.config.base
        size = jax.tree.leaves(self.base)[0].dtype.itemsize
        batch_size, seq_len = self.batch.tokens.shape
        tokens = batch_size // (mesh.num_row_shards * config.accumulation_steps) * seq_len

        # Arrays that all layers have. Heads that `tensor` does not divide are on every device.
        heads = layer.num_heads / (mesh.tensor if layer.num_kv_heads % mesh.tensor == 0 else 1)
        scores = FLOAT32 * tokens * heads * seq_len
        inner = size * tokens * 3 * layer.intermediate_size / mesh.tensor
        state = size * tokens * layer.hidden_size
        logits = FLOAT32 * min(config.loss_chunk, tokens) * layer.vocab_size / mesh.tensor

        # The teacher keeps only the states that the head reads, so one of its layers counts.
        teacher = 2 * scores + inner + 6 * state
        kept = (len(config.head.config.features) + 1) * state

        # The head's layers keep everything for the backward pass: the attention's scores and
        # weights, the MLP's inner states, some states of width D; with `remat` the scores of one
        # layer at a time. Every layer of a head has one leaf `qkv`, whatever the method.
        leaves = jax.tree_util.tree_leaves_with_path(self.state.params)
        num_layers = sum(path[-1].key == "qkv" for path, _ in leaves)
        positions = config.head.config.num_positions
        with_scores = min(num_layers, 1) if config.remat else num_layers
        # Blocks at few anchors add their slots to the text, and are all that is trained.
        anchors = min(config.head.module.num_anchors, seq_len)
        slots = anchors * (positions + 1) / seq_len
        scores, trained = (scores * slots, anchors / seq_len) if anchors else (scores, 1)
        of_layers = num_layers * (1 + slots) * (inner + 6 * state)
        head = with_scores * 2 * scores + of_layers + positions * trained * 6 * state

        # A few chunks of logits live together, and two states of each position.
        loss = 4 * logits + 2 * positions * trained * state
        return int(kept + max(teacher, head + loss))


def step_shapes(settings: TrainSettings, dtype: jnp.dtype) -> StepShapes:
    """Return the step of a run with these settings on one device, from the base's config alone."""
    base = describe_base(settings.base)
    head = make_head(settings, base)
    pipeline_config(settings, base, head)  # raises for rows that cannot be
    if settings.draft_vocab is not None:  # any tokens will do: the shapes are the same
        ids = tuple(range(min(settings.draft_vocab, base.config.vocab_size)))
        head = registry.head(dataclasses.replace(head.config, draft_to_target=ids))

    # The rows; the teacher's states are among them if it does not run within the step.
    shape, hidden = (settings.batch_size, settings.seq_len), None
    ids_shape, mask = (jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, bool))
    if settings.teacher == "cached":
        states = jax.ShapeDtypeStruct((*shape, head.config.layer.hidden_size), dtype)
        hidden = dict.fromkeys(stored_names(head.config.features), states)
    batch: tuple[Any, ...] = (ids_shape, ids_shape, ids_shape, mask, hidden)

    config = step_config(settings, base.config, head)
    # The base's weights are traced as shapes, so none are read or allocated.
    params = base_shapes(base.config, dtype)
    return StepShapes(
        config=config,
        state=jax.eval_shape(lambda base: init_state(config, base, settings.seed), params),
        base=jax.eval_shape(lambda base: with_draft_rows(base, head.config), params),
        batch=Batch(*batch),
    )


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The figures of a dry run.

    bytes_per_device: by kind; gathered: copies of weights, if the dtype of the step or fsdp
        needs them: at one time the base's vocabulary and two layers, and the whole draft.
    device_memory: of each device; None if unknown.
    seconds: at UTILIZATION of the device's matrix rate; None if that is unknown.
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
        return sum(self.bytes_per_device.values())

    def check_memory(self, at_rest: bool = False) -> None:
        """Raise UserError if a device's memory is known and too small.

        at_rest: count only the bytes that stay between steps.
        """
        parts = {k: n for k, n in self.bytes_per_device.items() if k in AT_REST or not at_rest}
        needed = sum(parts.values())
        if self.device_memory is None or needed <= self.device_memory:
            return

        # The largest kind decides the advice.
        largest = max(parts, key=lambda kind: parts[kind])
        advice = {
            "base": "split the base over more devices with fsdp or tensor",
            "activations": "give a smaller --batch_size or --seq_len, more devices, more "
            "--gradient_accumulation_steps, or --remat",
        }
        raise UserError(
            f"a device would need {gigabytes(needed)} and has {gigabytes(self.device_memory)}; the "
            f"largest part is {largest} with {gigabytes(self.bytes_per_device[largest])}: "
            f"{advice.get(largest, 'split it over more devices with fsdp')}"
        )

    def lines(self) -> list[str]:
        of, estimated = "", ON_A_CPU
        if self.device_memory is not None:
            of, estimated = f" of {gigabytes(self.device_memory)}", "activations are estimated"
        parts = ", ".join(f"{kind} {gigabytes(n)}" for kind, n in self.bytes_per_device.items())
        tokens = self.tokens_per_step * self.steps
        # Only targets have a known rate.
        time = "time: unknown for this device; give --target for another"
        if self.seconds is not None:
            time = (
                f"time: {self.seconds / 3600:.2f} hours, {self.seconds / self.steps:.3g} s a step, "
                f"if {UTILIZATION:.0%} of the device's matrix rate is reached"
            )

        return [
            f"mesh {self.mesh}: {self.mesh.size} device{'s' if self.mesh.size > 1 else ''}",
            f"params: base {self.base_params:,}, draft {self.draft_params:,}",
            f"memory a device: {gigabytes(self.total_bytes)}{of} ({parts}; {estimated})",
            f"work: {self.flops_per_step:.3g} FLOPs a step, {self.steps:,} steps of "
            f"{self.tokens_per_step:,} tokens, {tokens:.3g} tokens in all",
            time,
        ]


def dry_run(settings: TrainSettings, mesh: str | None, target: Target | None = None) -> DryRun:
    """Return what a run with these settings would take.

    mesh: as `--mesh`; it may have more devices than this machine. target: None is this machine.
    """
    # Check the settings before anything is traced.
    if target is not None and target.platform == "tpu":
        # By default fsdp takes all chips of the topology.
        shape = parse_mesh(mesh or "fsdp=-1", target.num_chips)
    else:
        # A mesh may name more devices than this machine has, but -1 stands for those it has.
        here = len(jax.devices()) if mesh and "-1" in mesh else None
        shape = parse_mesh(mesh, here) if mesh else MeshShape()
    placed = make_abstract_mesh(shape)
    check_rows(settings, placed)
    step = step_shapes(settings, dtype_for(settings, target))
    work = count_work(
        functools.partial(train_step, step.config),
        step.state,
        step.base,
        step.batch,
        loop_trips=step.trips(),
        platform=target.platform if target else None,
    )

    # The kinds in the order of the report, in bytes as they lie on the mesh between steps.
    kinds = {"base": step.base, "draft": step.state.params, "optimizer": step.state.opt_state}
    sizes = {k: bytes_per_device(tree, param_shardings(tree, placed)) for k, tree in kinds.items()}
    # Gradients are float32 like the draft's params, and split in the same way.
    sizes["gradients"] = sizes["draft"]
    sizes["gathered"] = gathered_bytes(step.base, placed)
    dtype = jax.tree.leaves(step.base)[0].dtype
    if shape.fsdp > 1 or dtype != jnp.float32:  # the draft is gathered or cast
        sizes["gathered"] += whole_over_rows(cast_shapes(step.state.params, dtype), placed)
    sizes["activations"] = step.activation_bytes(shape)

    def count(params: Params) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    rate = target.chip.matrix_rate * UTILIZATION if target else None
    # CPUs do not report a limit.
    here = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return DryRun(
        mesh=shape,
        # Without the copy of lm_head's rows that a reduced vocabulary drafts with.
        base_params=count({k: v for k, v in step.base.items() if k != DRAFT_ROWS}),
        draft_params=count(step.state.params),
        bytes_per_device=sizes,
        device_memory=target.chip.memory if target else here,
        flops_per_step=work.all_flops,
        tokens_per_step=settings.batch_size * settings.seq_len,
        steps=settings.steps,
        seconds=rate and settings.steps * work.all_flops / (shape.size * rate),
    )


def dry_run_compiled(settings: TrainSettings, dry: DryRun, target: Target) -> dict[str, Any] | None:
    """Compile the step of a dry run for its target, print the compiler's account and return it.

    None, with a line on stderr, if the compiler is not installed. Raises UserError if the step
    does not fit a device, according to the dry run or to the compiler.
    """
    dry.check_memory(at_rest=True)  # before minutes of compilation
    step = step_shapes(settings, dtype_for(settings, target))
    try:
        with passing_note(f"compiling for {target.name}"):
            lowered = lower_training_step(step, dry.mesh, target)
            compiled, seconds = compile_for(target, lowered, COMPILED_ADVICE)
    except NoCompiler as error:
        say(f"memory is estimated only: {error}")
        return None

    devices = dry.mesh.size
    row: dict[str, Any] = {"target": target.name, "devices": devices, "compile_seconds": seconds}
    row |= account(compiled, target.chip)
    # The loops of the step run more than once, so the dry run's FLOPs are the larger count.
    flops = max(dry.flops_per_step / devices, row["flops"] or 0.0)
    row["floor_seconds"] = floor = target.chip.floor(row["bytes_accessed"] or 0.0, flops)
    lines = [
        f"compiled for {target.name}, {devices} devices, in {seconds:.0f} s",
        *account_lines(row),
        f"floor of a step: {floor:.3g} s from the data sheet",
    ]
    print("\n".join(lines))

    # A compiler for absent devices may compile a program that they cannot hold.
    if not row["fits"]:
        needed = f"{gigabytes(row['resident_bytes'])} of {gigabytes(target.chip.memory)}"
        raise UserError(
            f"the compiled step does not fit a device of {target.name}: it would need {needed}; "
            f"{COMPILED_ADVICE}"
        )
    return row


def lower_training_step(step: StepShapes, mesh: MeshShape, target: Target) -> Lowered:
    """Lower the step for the devices of a target, its arguments laid out as the trainer does."""
    devices = make_mesh(mesh, find_devices(target, mesh.size))
    config = dataclasses.replace(step.config, mesh=devices)
    arguments = (
        with_shardings(step.state, param_shardings(step.state, devices)),
        with_shardings(step.base, param_shardings(step.base, devices)),
        with_shardings(step.batch, row_shardings(step.batch, devices)),
    )
    return make_train_step(config).trace(*arguments).lower()


def dtype_for(settings: TrainSettings, target: Target | None) -> jnp.dtype:
    """Return the dtype of a run on a target; None is this machine."""
    # "auto" depends on the device, which is absent here: accelerators compute in bfloat16.
    is_elsewhere = target is not None and settings.dtype == "auto"
    return jnp.dtype("bfloat16") if is_elsewhere else resolve_dtype(settings.dtype)


def gigabytes(number: float) -> str:
    """Return bytes for a reader."""
    return f"{number / 1e9:.2f} GB"
