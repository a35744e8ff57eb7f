"""`bench --sweep`: the cost of verification by batch size and nodes, and when speculation pays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.benchmark.measured import describe_run
from clover_jax.decoding.tree import TokenTree
from clover_jax.errors import UserError
from clover_jax.loading.decode_states import cache_size, fitting_context
from clover_jax.loading.models import Models, load
from clover_jax.loading.spec import ModelSpec
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.storage.files import atomic_file
from clover_jax.timing.loops import draft_loop, step_loop, steps_at_once, verify_loop
from clover_jax.timing.parts import Bench
from clover_jax.timing.turns import Run, time_in_turns

FIGURE = "costs.png"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One batch size and tree size, times in milliseconds.

    break_even: drafted tokens that a step must accept to be as fast as plain decoding, at the cost
        of the measured tree's draft.
    """

    batch_size: int
    nodes: int
    plain_ms: float
    verify_ms: float
    draft_ms: float
    break_even: float


def sweep_and_describe(
    spec: ModelSpec,
    *,
    batch_sizes: Sequence[int],
    nodes: Sequence[int],
    context: int | None,
    rounds: int,
    output: str | None,
) -> dict[str, Any]:
    """Time batch sizes and tree sizes, print the table, draw it in the folder `output`.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `load` and `sweep` do.
    """
    with passing_note(f"loading {spec.base}"):
        models = load(spec)
    context = context or fitting_context(models, room=0)
    # In float32 products are exact, as they are when rows are decoded.
    with passing_note("measuring"), exact_matmuls(str(models.dtype)):
        cells = sweep(models, batch_sizes, nodes, context, rounds)
    print("\n".join(describe(cells, models.tree.name)))

    # The table is out by now, should the disk be full.
    report = describe_run(models, spec) | {
        "context": context,
        "rounds": rounds,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    if output is not None:
        report["figure"] = str(draw(cells, Path(output).expanduser()))
    return report


def sweep(
    models: Models, batch_sizes: Sequence[int], nodes: Sequence[int], context: int, rounds: int
) -> list[Cell]:
    """Time every batch size with every number of nodes.

    Raises UserError for a base alone: there is nothing to verify.
    """
    if models.head is None:
        raise UserError("--sweep needs a draft; give --draft=random:clover2 or a folder")
    models.step()  # raises UserError where the head cannot draft the tree

    # The measured tree's own size too: its step less its parts is the rest of every step.
    own = models.tree.num_nodes
    cells = []
    for batch in batch_sizes:
        seconds = measure(models, batch, context, sorted({*nodes, own}), rounds)
        rest = max(seconds["step"] - seconds["draft"] - seconds[f"verify {own}"], 0.0)
        for count in nodes:
            # The draft of the measured tree, with the verification of a tree of `count` nodes.
            verify = seconds[f"verify {count}"]
            step = seconds["draft"] + verify + rest
            cell = Cell(
                batch_size=batch,
                nodes=count,
                plain_ms=round(1e3 * seconds["plain"], 4),
                verify_ms=round(1e3 * verify, 4),
                draft_ms=round(1e3 * seconds["draft"], 4),
                # A step as long as n plain ones must emit n tokens; one is the base's own.
                break_even=round(step / seconds["plain"] - 1, 3),
            )
            cells.append(cell)
    return cells


def measure(
    models: Models, batch: int, context: int, nodes: Sequence[int], rounds: int
) -> dict[str, float]:
    """Return the seconds of "plain", "step", "draft" and "verify N" for each number of nodes.

    Each runs as `timing.loops` has it, alternating with the others.
    """
    size = cache_size(models, context, room=0)
    bench, plain = Bench(models, batch, size, context), Bench(models.plain(), batch, size, context)

    def run(bench: Bench, loop: Callable[..., Any]) -> Run:
        return bench.updating(functools.partial(loop, bench.models.step())).run

    runs = {
        "plain": run(plain, step_loop),
        "step": run(bench, step_loop),
        "draft": run(bench, draft_loop),
    }
    for count in nodes:
        # A root and its children; the shape of a tree does not change the cost.
        shape, vocabulary = (batch, count + 1), models.base.config.vocab_size
        tokens = jax.random.randint(jax.random.key(3), shape, 0, vocabulary, jnp.int32)
        parent = jnp.where(jnp.arange(count + 1) == 0, -1, 0)[None]
        verify = functools.partial(verify_loop, models.step())
        tree = TokenTree(tokens, parent, depth=1)
        runs[f"verify {count}"] = bench.reading(verify, tree).run

    timed = time_in_turns(runs, rounds)
    return {name: seconds / steps_at_once() for name, seconds in timed.items()}


def describe(cells: Sequence[Cell], tree: str) -> list[str]:
    """Return the table, line by line."""
    lines = [
        f"drafting as for tree {tree}",
        f"{'batch':>5}{'nodes':>7}{'plain ms':>10}{'verify ms':>11}{'x plain':>9}"
        f"{'draft ms':>10}{'break-even':>12}",
    ]

    for cell in cells:
        lines.append(
            f"{cell.batch_size:>5}{cell.nodes:>7}{cell.plain_ms:>10.3f}{cell.verify_ms:>11.3f}"
            f"{cell.verify_ms / cell.plain_ms:>9.2f}{cell.draft_ms:>10.3f}{cell.break_even:>12.2f}"
        )
    return lines


def draw(cells: Sequence[Cell], folder: Path) -> Path:
    """Draw verification in plain steps, and the break-even length, over the nodes."""
    from matplotlib.figure import Figure  # slow to import, and only for a figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)

    for batch in sorted({cell.batch_size for cell in cells}):
        row = [cell for cell in cells if cell.batch_size == batch]
        nodes = [cell.nodes for cell in row]
        left.plot(nodes, [c.verify_ms / c.plain_ms for c in row], "o-", label=f"batch {batch}")
        right.plot(nodes, [c.break_even for c in row], "o-", label=f"batch {batch}")

    left.set(xlabel="drafted nodes", ylabel="verification, in plain steps", ylim=(0, None))
    right.set(xlabel="drafted nodes", ylabel="accepted tokens to break even", ylim=(0, None))
    left.legend()

    path = folder / FIGURE
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    return path
