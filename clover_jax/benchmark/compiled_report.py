"""The words and the JSON of `bench --target`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from clover_jax.benchmark.compiled import CompiledStep, compile_step
from clover_jax.loading.subject import fitting_context, shape_subject
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.versions import versions
from clover_jax.storage.files import place_for
from clover_jax.xla.targets import Target

GIGA = 1e9


def compile_and_describe(
    target: Target,
    *,
    base: str,
    draft: str,
    tree: str | None,
    dtype: str,
    int8: Sequence[str] = (),
    mesh: str | None,
    batch: int,
    context: int | None,
    program: str | None = None,
) -> dict[str, Any]:
    """Compile the step, print what the compiler made of it, return it as JSON values.

    context: None takes what fits, see `fitting_context`.
    program: a file for the compiled program's text.
    Raises UserError as `compile_step` does, and before compiling where there is no such folder.
    """
    path = None if program is None else place_for(program, "--program")
    subject = shape_subject(base, draft, tree, jnp.dtype(dtype), int8)
    context = context or fitting_context(subject, room=0)
    with passing_note(f"compiling for {target.name}"):
        compiled, text = compile_step(subject, target, mesh, batch, context)
    settings = {
        "base": base,
        "draft": draft,
        "tree": subject.tree.name,
        "dtype": dtype,
        "int8": list(subject.int8),
        "mesh": mesh,
        "batch_size": batch,
        "context": context,
    }
    if compiled.rows != batch:
        print(f"--batch_size={batch} is made {compiled.rows} rows, so that each device has as many")
    for line in describe(compiled, target):
        print(line)
    if path is not None:
        path.write_text(text)  # what was found is printed by then, whatever the disk says
    return settings | compiled.to_dict() | {"versions": versions(target.platform)}


def describe(compiled: CompiledStep, target: Target) -> list[str]:
    """Return the report's lines."""
    chip = target.chip
    resident = (
        compiled.argument_bytes
        + compiled.output_bytes
        - compiled.aliased_bytes
        + compiled.temporary_bytes
    )
    share = compiled.temporary_bytes / compiled.weight_bytes
    values = compiled.temporary_value_bytes
    counted = compiled.counted_over_floor
    estimate = compiled.estimated_seconds
    lines = [
        f"{target.name}, {compiled.devices} x {chip.name}: compiled in "
        f"{compiled.compile_seconds:.0f} s",
        f"memory a device: {resident / GIGA:.2f} of {chip.memory / GIGA:.0f} GB (weights "
        f"{compiled.weight_bytes / GIGA:.2f}, caches {compiled.cache_bytes / GIGA:.2f}, "
        f"temporaries {compiled.temporary_bytes / GIGA:.3f} or {share:.1%} of the weights"
        f", their values {values / compiled.weight_bytes:.2%})",
        f"bytes moved: {compiled.moved_bytes / GIGA:.2f} GB, {compiled.moved_over_floor:.2f} x the "
        f"floor of {compiled.floor_bytes / GIGA:.2f} GB"
        + ("" if counted is None else f" (the compiler counts {counted:.2f} x)"),
        f"floor {1e3 * compiled.floor_seconds:.2f} ms by the data sheet"
        + ("" if estimate is None else f"; the compiler estimates {1e3 * estimate:.2f} ms"),
    ]
    lines += _parts(compiled)
    groups = {
        "copies of a cache": compiled.cache_copies,
        "copies of a weight": compiled.weight_copies,
        "collectives": compiled.collectives,
        "most above the floor": compiled.costly,
        "largest results": compiled.largest,
    }
    for title, found in groups.items():
        lines.append(f"{title}: {'none' if not found else ''}".rstrip())
        lines += [f"  {item}" for item in found]
    return lines


def _parts(compiled: CompiledStep) -> list[str]:
    """Return the bytes and the estimate by part, and the head's bytes against their floor."""
    seconds = compiled.seconds_by_part or {}
    listed = ", ".join(
        f"{part} {moved / GIGA:.2f} GB"
        + (f" and {1e3 * seconds[part]:.2f} ms" if part in seconds else "")
        for part, moved in compiled.moved_by_part.items()
    )
    lines = [f"by part: {listed}"]
    if compiled.draft_floor_bytes:
        lines.append(
            f"the head (absorb and draft): {compiled.draft_bytes / GIGA:.2f} GB, "
            f"{compiled.draft_bytes / compiled.draft_floor_bytes:.2f} x its floor of "
            f"{compiled.draft_floor_bytes / GIGA:.2f} GB"
        )
    return lines
