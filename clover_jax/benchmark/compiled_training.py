"""The real training step, compiled for hardware that is not here: memory, time, what is sent."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import jax

from clover_jax.array_types import PyTree
from clover_jax.benchmark.step_shapes import StepShapes
from clover_jax.errors import UserError
from clover_jax.sharding.device_bytes import bytes_per_device, whole_over_rows
from clover_jax.sharding.meshes import MeshShape, make_mesh
from clover_jax.sharding.placement import param_shardings, row_shardings, with_shardings
from clover_jax.training.step import make_train_step
from clover_jax.xla import program_figures as figures
from clover_jax.xla.buffers import compile_with_buffers
from clover_jax.xla.hlo import Program, Sent
from clover_jax.xla.targets import Target, find_devices

GIGA, MEGA = 1e9, 1e6
PARTS = ("teacher", "head", "loss", "update")  # scopes of the step
_FULL = re.compile(r"Used ([\d.]+\w) of ([\d.]+\w) hbm")


@dataclasses.dataclass(frozen=True)
class CompiledTraining:
    """What the compiler says of a training step; bytes and seconds are those of one device.

    arguments: what lies there between steps, by kind. temporaries: what the step needs beside.
    resident: the most at one time; the new state takes the place of the old one.
    seconds_by_part: its cycle estimates at the chip's clock, where every position has a target, by
        teacher, head, loss and update; None where it gives none. Waiting for what other devices
        send is not in them.
    whole_base: the base's bytes, as far as fsdp splits it. largest_gather: of its weights, in one
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
        if self.resident > self.device_memory:
            raise _too_large(
                self.target, f"{_gigabytes(self.resident)} of {_gigabytes(self.device_memory)}"
            )

    def lines(self) -> list[str]:
        """Return the figures for a reader."""
        kinds = ", ".join(f"{kind} {_gigabytes(n)}" for kind, n in self.arguments.items())
        lines = [
            f"compiled for {self.target}, {self.devices} devices, in {self.compile_seconds:.0f} s",
            f"memory a device, by the compiler: {_gigabytes(self.resident)} of "
            f"{_gigabytes(self.device_memory)} ({kinds}, temporaries "
            f"{_gigabytes(self.temporaries)})",
        ]
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
        total = sum(sent.in_all for sent in self.sent)
        lines.append(f"collectives of a step: {_gigabytes(total) if self.sent else 'none'}")
        lines += [
            f"  {sent.times} x {sent.kind}: {sent.num_bytes / MEGA:.1f} MB each"
            for sent in self.sent[: figures.TOP]
        ]
        for title, found in {
            "most above the time of their bytes": self.costly,
            "largest results": self.largest,
        }.items():
            lines += [f"{title}:", *(f"  {item}" for item in found)]
        return lines

    def to_row(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return dataclasses.asdict(self)


class CompiledText(NamedTuple):
    """The figures, and the program that they were read from."""

    figures: CompiledTraining
    text: str


def compile_training_step(step: StepShapes, mesh: MeshShape, target: Target) -> CompiledText:
    """Compile the step for the target; minutes, for a base of billions of params.

    Raises UserError where the compiler is missing, or where it says that the step does not fit.
    """
    devices = make_mesh(mesh, find_devices(target, mesh.size))
    config = dataclasses.replace(step.config, mesh=devices)
    places = {
        "state": param_shardings(step.state, devices),
        "base": param_shardings(step.base, devices),
        "batch": row_shardings(step.batch, devices),
    }
    placed = [with_shardings(getattr(step, name), places[name]) for name in places]
    try:
        compiled = compile_with_buffers(make_train_step(config).trace(*placed).lower())
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(target, error) from error
    text = compiled.program.as_text()
    program, memory = Program(text), compiled.program.memory_analysis()
    temporaries = compiled.temporaries.allocated
    trips = step.trips(mesh.num_row_shards)
    sent = program.sent(trips)
    found = CompiledTraining(
        target=target.name,
        devices=mesh.size,
        compile_seconds=compiled.seconds,
        arguments=_arguments(step, places),
        temporaries=temporaries,
        resident=figures.resident_bytes(memory, temporaries),
        device_memory=target.chip.memory,
        seconds_by_part=figures.estimated_seconds(program, target.chip, trips, PARTS),
        whole_base=whole_over_rows(step.base, devices),
        largest_gather=max((s.num_bytes for s in sent if s.kind == "all-gather"), default=0),
        sent=sent,
        costly=figures.costly(program, target.chip, trips),
        largest=figures.largest(program),
    )
    return CompiledText(found, text)


def _arguments(step: StepShapes, places: dict[str, PyTree]) -> dict[str, int]:
    """Return the bytes of a device's arguments by kind."""
    state = places["state"]
    return {
        "base": bytes_per_device(step.base, places["base"]),
        "draft": bytes_per_device(step.state.params, state.params),
        "optimiser": bytes_per_device(step.state.opt_state, state.opt_state),
        "batch": bytes_per_device(step.batch, places["batch"]),
    }


def _refusal(target: Target, error: jax.errors.JaxRuntimeError) -> Exception:
    """Return a user's mistake where the compiler says that the step is too large."""
    found = _FULL.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not found:
        return error
    return _too_large(target.name, f"{found[1]} of {found[2]}, by the compiler's own account")


def _too_large(target: str, needed: str) -> UserError:
    return UserError(
        f"the compiled step does not fit a device of {target}: it would need {needed}; give more "
        "devices, a smaller --batch_size, more --gradient_accumulation_steps, or --remat"
    )


def _gigabytes(number: float) -> str:
    return f"{number / GIGA:.2f} GB"
