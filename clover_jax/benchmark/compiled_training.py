"""`train --dry_run --target`: compile the training step for hardware that is not here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

from clover_jax.benchmark.step_shapes import StepShapes, gigabytes
from clover_jax.errors import UserError
from clover_jax.sharding.device_bytes import bytes_per_device, whole_over_rows
from clover_jax.sharding.meshes import MeshShape, make_mesh
from clover_jax.sharding.placement import param_shardings, row_shardings, with_shardings
from clover_jax.training.step import make_train_step
from clover_jax.xla import program_costs
from clover_jax.xla.buffers import compile_with_buffers
from clover_jax.xla.hlo import Program, Sent
from clover_jax.xla.targets import Target, find_devices

MEGA = 1e6
PARTS = ("teacher", "head", "loss", "update")  # scopes of the step
# XLA's message for a program that is too large: bytes that it would use, of how many.
_FULL = re.compile(r"(?:Used|temporaries) \(?([\d.]+\w).*? (?:of|HBM) \(?([\d.]+\w)")


@dataclasses.dataclass(frozen=True)
class CompiledTraining:
    """The compiler's figures of a training step; bytes and seconds are those of one device.

    arguments: bytes that lie there between steps, by kind. temporaries: more, during a step.
    resident: the most at one time; the new state takes the place of the old one.
    seconds_by_part: its cycle estimates at the chip's clock, where every position has a target, by
        teacher, head, loss and update; None where it gives none. Waiting for other devices is not
        in them.
    whole_base: the base's bytes, gathered over fsdp. largest_gather: of its weights, in one
        operation.
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

    def check_memory(self) -> None:
        """Raise UserError where a device's memory is too small."""
        # A compiler for absent devices may compile what they cannot hold.
        if self.resident > self.device_memory:
            needed = f"{gigabytes(self.resident)} of {gigabytes(self.device_memory)}"
            raise _too_large(self.target, needed)

    def lines(self) -> list[str]:
        """Return the figures for a reader."""
        kinds = ", ".join(f"{kind} {gigabytes(n)}" for kind, n in self.arguments.items())
        lines = [
            f"compiled for {self.target}, {self.devices} devices, in {self.compile_seconds:.0f} s",
            f"memory a device, by the compiler: {gigabytes(self.resident)} of "
            f"{gigabytes(self.device_memory)} ({kinds}, temporaries "
            f"{gigabytes(self.temporaries)})",
        ]

        # Not every compiler gives estimates, and not every mesh gathers.
        if self.seconds_by_part is not None:
            parts = ", ".join(f"{part} {n:.3g}" for part, n in self.seconds_by_part.items())
            lines.append(
                f"time of a step, by the compiler: {sum(self.seconds_by_part.values()):.3g} s "
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
            for sent in self.sent[: program_costs.TOP]
        ]
        return lines + program_costs.titled_lines(
            {"most above the time of their bytes": self.costly, "largest results": self.largest}
        )

    def to_row(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return dataclasses.asdict(self)


def compile_training_step(
    step: StepShapes, mesh: MeshShape, target: Target
) -> tuple[CompiledTraining, str]:
    """Compile the step for the target, in minutes for a large base; return also its text.

    Raises UserError where the compiler is missing, or where it says that the step does not fit.
    """
    # The step of a run, but on devices that are not here.
    devices = make_mesh(mesh, find_devices(target, mesh.size))
    config = dataclasses.replace(step.config, mesh=devices)

    # The arguments, as the trainer lays them out.
    state_places = param_shardings(step.state, devices)
    base_places = param_shardings(step.base, devices)
    batch_places = row_shardings(step.batch, devices)
    arguments = (
        with_shardings(step.state, state_places),
        with_shardings(step.base, base_places),
        with_shardings(step.batch, batch_places),
    )

    # XLA itself refuses a program that is far too large.
    try:
        compiled = compile_with_buffers(make_train_step(config).trace(*arguments).lower())
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(target, error) from error

    # The loss goes through as many chunks as there would be if every position had a target.
    text: Any = compiled.program.as_text()
    program, trips = Program(text), step.trips(mesh.num_row_shards)
    sent = program.sent(trips)
    return CompiledTraining(
        target=target.name,
        devices=mesh.size,
        compile_seconds=compiled.seconds,
        arguments={
            "base": bytes_per_device(step.base, base_places),
            "draft": bytes_per_device(step.state.params, state_places.params),
            "optimiser": bytes_per_device(step.state.opt_state, state_places.opt_state),
            "batch": bytes_per_device(step.batch, batch_places),
        },
        temporaries=compiled.temporaries.allocated,
        resident=compiled.resident_bytes,
        device_memory=target.chip.memory,
        seconds_by_part=program_costs.estimated_seconds(program, target.chip, trips, PARTS),
        whole_base=whole_over_rows(step.base, devices),
        largest_gather=max((s.num_bytes for s in sent if s.kind == "all-gather"), default=0),
        sent=sent,
        costly=program_costs.costly(program, target.chip, trips),
        largest=program_costs.largest(program),
    ), text


def _refusal(target: Target, error: jax.errors.JaxRuntimeError) -> Exception:
    """Return a user's mistake where the compiler says that the step is too large."""
    # Any other failure of the compiler is a bug, and keeps its traceback.
    sizes = _FULL.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
        return error
    return _too_large(target.name, f"{sizes[1]} of {sizes[2]}, by the compiler's own account")


def _too_large(target: str, needed: str) -> UserError:
    return UserError(
        f"the compiled step does not fit a device of {target}: it would need {needed}; give more "
        "devices, a smaller --batch_size, more --gradient_accumulation_steps, or --remat"
    )
