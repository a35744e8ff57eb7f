"""`python -m experiments.aot train`: compile the training step for a target, read the program."""

from __future__ import annotations

import dataclasses
from typing import Any

from clover_jax.evaluation.dry_run import (
    COMPILED_ADVICE,
    StepShapes,
    dry_run,
    dtype_for,
    gigabytes,
    lower_training_step,
    step_shapes,
)
from clover_jax.evaluation.targets import Target
from clover_jax.models.meshes import MeshShape, make_abstract_mesh
from clover_jax.models.placement import (
    bytes_per_device,
    param_shardings,
    row_shardings,
    whole_over_rows,
)
from clover_jax.runtime.progress import passing_note
from clover_jax.training.settings import TrainSettings
from experiments.aot import costs
from experiments.aot.buffers import compile_with_buffers
from experiments.aot.hlo import Program, Sent
from experiments.aot.output_path import place_for

MEGA = 1e6
PARTS = ("teacher", "head", "loss", "update")  # scopes of the step


@dataclasses.dataclass(frozen=True)
class CompiledTraining:
    """The compiler's figures of a training step, in bytes and seconds of one device.

    arguments: bytes that stay between steps, by kind. temporaries: more, during a step.
    resident: the most at one time; the new state takes the place of the old one.
    seconds_by_part: the compiler's cycle estimates at the chip's clock if every position has a
        target, by teacher, head, loss and update, without waiting for other devices; None without
        estimates.
    whole_base: bytes of the base, gathered over fsdp. largest_gather: bytes of the largest
        all-gather.
    """

    target: str
    devices: int
    compile_seconds: float
    arguments: dict[str, int]
    temporaries: int
    resident: int
    device_memory: float
    seconds_by_part: dict[str, float] | None
    whole_base: int
    largest_gather: int
    sent: list[Sent]
    costly: list[str]
    largest: list[str]

    def lines(self) -> list[str]:
        """Return the figures for a reader."""
        kinds = ", ".join(f"{kind} {gigabytes(n)}" for kind, n in self.arguments.items())
        lines = [
            f"compiled for {self.target}, {self.devices} devices, in {self.compile_seconds:.0f} s",
            f"memory of a device: {gigabytes(self.resident)} of "
            f"{gigabytes(self.device_memory)} ({kinds}, temporaries "
            f"{gigabytes(self.temporaries)})",
        ]

        # Not every compiler gives estimates, and not every mesh gathers.
        if self.seconds_by_part is not None:
            parts = ", ".join(f"{part} {n:.3g}" for part, n in self.seconds_by_part.items())
            lines.append(
                f"estimated time of a step: {sum(self.seconds_by_part.values()):.3g} s "
                f"({parts}; without waiting for other devices)"
            )
        if self.largest_gather:
            lines.append(
                f"largest all-gather: {self.largest_gather / MEGA:.0f} MB, "
                f"{self.largest_gather / self.whole_base:.1%} of the base"
            )

        # All that is sent, then the kinds that send most.
        total = sum(sent.in_all for sent in self.sent)
        lines.append(f"collectives of a step: {gigabytes(total) if self.sent else 'none'}")
        lines += [
            f"  {sent.times} x {sent.kind}: {sent.num_bytes / MEGA:.1f} MB each"
            for sent in self.sent[: costs.TOP]
        ]
        return lines + costs.titled_lines(
            {"most above the time of their bytes": self.costly, "largest results": self.largest}
        )


def compile_and_describe(
    settings: TrainSettings, mesh: str | None, target: Target, *, program: str | None = None
) -> dict[str, Any]:
    """Compile the step of a run, print the figures, return them as JSON values.

    program: a file for the compiled program's text.
    Raises UserError as `compile_training_step` does, and before compiling if the file cannot be
    written, or a device is too small for what stays there between steps.
    """
    path = None if program is None else place_for(program, "--program")
    dry = dry_run(settings, mesh, target)
    dry.check_memory(at_rest=True)
    step = step_shapes(settings, dtype_for(settings, target))
    with passing_note(f"compiling for {target.name}"):
        compiled, text = compile_training_step(step, dry.mesh, target)

    print("\n".join(compiled.lines()))
    # After the figures, so that a full disk costs the program's text alone.
    if path is not None:
        path.write_text(text)
    return dataclasses.asdict(compiled)


def compile_training_step(
    step: StepShapes, mesh: MeshShape, target: Target
) -> tuple[CompiledTraining, str]:
    """Compile the step for the target, in minutes for a large base; return also its text.

    Raises UserError if the compiler is missing, or reports that the step does not fit.
    """
    lowered = lower_training_step(step, mesh, target)
    compiled = compile_with_buffers(target, lowered, COMPILED_ADVICE)
    placed = make_abstract_mesh(mesh)

    def held(tree: Any) -> int:
        return bytes_per_device(tree, param_shardings(tree, placed))

    # The loss goes through as many chunks as there would be if every position had a target.
    text: Any = compiled.program.as_text()
    program, trips = Program(text), step.trips(mesh.num_row_shards)
    sent = program.sent(trips)
    return CompiledTraining(
        target=target.name,
        devices=mesh.size,
        compile_seconds=compiled.seconds,
        arguments={
            "base": held(step.base),
            "draft": held(step.state.params),
            "optimizer": held(step.state.opt_state),
            "batch": bytes_per_device(step.batch, row_shardings(step.batch, placed)),
        },
        temporaries=compiled.temporaries.allocated,
        resident=compiled.resident_bytes,
        device_memory=target.chip.memory,
        seconds_by_part=costs.estimated_seconds(program, target.chip, trips, PARTS),
        whole_base=whole_over_rows(step.base, placed),
        largest_gather=max((s.num_bytes for s in sent if s.kind == "all-gather"), default=0),
        sent=sent,
        costly=costs.costly(program, target.chip, trips),
        largest=costs.largest(program),
    ), text
