"""The words and the JSON of `bench` on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from clover_jax.benchmark import sweep
from clover_jax.benchmark.measured import STAGES, Measurement, measure, room_for
from clover_jax.errors import UserError
from clover_jax.loading.subject import Subject, fitting_context, load_subject
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.versions import versions


def measure_and_describe(
    *,
    base: str,
    draft: str,
    tree: str | None,
    dtype: str,
    int8: Sequence[str],
    batch: int,
    context: int | None,
    rounds: int,
    force_accept: int | None,
) -> dict[str, Any]:
    """Time a step and its parts, print the table, return all of it as JSON values.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `load_subject` and `measure` do.
    """
    with passing_note(f"loading {base}"):
        subject = load_subject(base, draft, tree, resolve_dtype(dtype), int8)
    if force_accept is not None and force_accept > subject.levels:
        raise UserError(
            f"--force_accept={force_accept}: no path of the tree {subject.tree.name} has more than "
            f"{subject.levels} nodes"
        )
    context = context or fitting_context(subject, room_for(subject, rounds, force_accept))
    with passing_note("measuring"), exact_matmuls(str(subject.dtype)):
        measured = measure(subject, batch, context, rounds, force_accept)
    settings = describe_settings(subject, base, draft) | {
        "batch_size": batch,
        "context": context,
        "rounds": rounds,
        "force_accept": force_accept,
    }
    for line in describe(measured, force_accept):
        print(line)
    return settings | measured.to_dict() | {"device": device_name(), "versions": versions()}


def sweep_and_describe(
    *,
    base: str,
    draft: str,
    tree: str | None,
    dtype: str,
    int8: Sequence[str],
    batch_sizes: Sequence[int],
    nodes: Sequence[int],
    context: int | None,
    rounds: int,
    output: str | None,
) -> dict[str, Any]:
    """Time batch sizes and tree sizes, print the table, draw it in the folder `output`.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `load_subject` and `sweep` do.
    """
    with passing_note(f"loading {base}"):
        subject = load_subject(base, draft, tree, resolve_dtype(dtype), int8)
    context = context or fitting_context(subject, room=0)
    with passing_note("measuring"), exact_matmuls(str(subject.dtype)):
        cells = sweep.sweep(subject, batch_sizes, nodes, context, rounds)
    for line in sweep.describe(cells, subject.tree.name):
        print(line)
    settings = describe_settings(subject, base, draft) | {"context": context, "rounds": rounds}
    report = settings | {
        "cells": sweep.to_rows(cells),
        "device": device_name(),
        "versions": versions(),
    }
    if output is not None:
        report["figure"] = str(sweep.draw(cells, Path(output).expanduser()))
    return report


def describe_settings(subject: Subject, base: str, draft: str) -> dict[str, Any]:
    """Return what was measured, by the names of the command's flags, and how large it is."""
    parameters = [
        sum(leaf.size for leaf in jax.tree.leaves(params))
        for params in (subject.weights.base, subject.weights.draft)
    ]
    return {
        "base": base,
        "draft": draft,
        "tree": subject.tree.name,
        "dtype": str(subject.dtype),
        "int8": list(subject.int8),
        "base_parameters": parameters[0],
        "draft_parameters": parameters[1],
    }


def device_name() -> str:
    """Return what the measurement ran on."""
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else f"cpu ({jax.device_count()} device)"


def describe(measured: Measurement, force_accept: int | None) -> list[str]:
    """Return the table and the summary, line by line."""
    ceilings = measured.ceilings
    lines = [
        f"bandwidth {ceilings.bandwidth / 1e9:.1f} GB/s, matrix products "
        f"{ceilings.matrix_rate / 1e9:.0f} GFLOP/s",
        f"{'part':<18}{'ms':>10}{'floor ms':>10}{'x floor':>9}",
    ]
    for name in _shown(measured):
        part = measured.parts[name]
        floor = f"{1e3 * part.floor:10.3f}{part.ratio:9.2f}" if part.ratio else ""
        lines.append(f"{name:<18}{1e3 * part.seconds:10.3f}{floor}")
    accepted = "" if force_accept is None else f" (forced to accept {force_accept})"
    lines += [
        f"a plain step uses {measured.plain_bandwidth:.0%} of the bandwidth",
        f"a step{accepted} takes {measured.step_over_sum:.2f} x the sum of its parts, "
        f"{1e3 * measured.sum_of_parts:.3f} ms",
        f"in the engine {1e3 * measured.engine_step:.3f} ms a step, without its looks at the text "
        f"{1e3 * measured.chunk_step:.3f} ms: {measured.host_overhead:+.1%} for the host",
        f"as fast as plain decoding at {measured.break_even:.2f} accepted tokens a step",
    ]
    return lines


def _shown(measured: Measurement) -> list[str]:
    """Return the parts in the order of a step, a draft's levels under the whole of it."""
    levels = [name for name in measured.parts if name.startswith("draft level")]
    order = ["plain step", "step"]
    for stage in STAGES:
        order += [stage, *levels] if stage == "draft" else [stage]
    return [name for name in order if name in measured.parts]
