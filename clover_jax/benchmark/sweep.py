"""`bench --sweep`: the cost of verification by batch size and nodes, and when speculation pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clover_jax.benchmark.measured import describe_run
from clover_jax.decoding.tree_config import AdaptiveTree, CopyTree
from clover_jax.errors import UserError
from clover_jax.loading.decode_states import fitting_context
from clover_jax.loading.models import Models, load
from clover_jax.loading.spec import ModelSpec
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.storage.files import atomic_file
from clover_jax.tree_search.costs import WIDTHS, measure_costs
from clover_jax.tree_search.tree_choice import CostTable

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

    # `_cell` looks up the tree's own widths and no others, so they are timed beside WIDTHS.
    widths = expanded_widths(models)
    cells = []
    for batch in batch_sizes:
        costs = measure_costs(
            models,
            batch,
            context,
            rounds=rounds,
            slots=sorted({1, *(count + 1 for count in nodes)}),
            widths=sorted({*WIDTHS, *widths}),
            depth=models.levels,
        )
        cells += [_cell(costs, batch, count, widths) for count in nodes]
    return cells


def expanded_widths(models: Models) -> list[int]:
    """Return the number of nodes that are expanded on each level below the root."""
    # Copies are added beside the tree and expand none of its nodes.
    tree = models.tree.drafted if isinstance(models.tree, CopyTree) else models.tree
    if isinstance(tree, AdaptiveTree):
        return [tree.width] * (models.levels - 1)
    return [level.expanded.size for level in tree.levels() if level.expanded.size]


def _cell(costs: CostTable, batch: int, nodes: int, widths: Sequence[int]) -> Cell:
    # The draft of the measured tree, with the verification of a tree of `nodes` nodes.
    verify = dict(costs.verify)[nodes + 1]  # the root is a slot too
    draft = costs.first + sum(dict(costs.level)[width] for width in widths)
    step = draft + verify + costs.rest

    return Cell(
        batch_size=batch,
        nodes=nodes,
        plain_ms=round(1e3 * costs.plain, 4),
        verify_ms=round(1e3 * verify, 4),
        draft_ms=round(1e3 * draft, 4),
        # A step as long as n plain ones must emit n tokens; one is the base's own.
        break_even=round(step / costs.plain - 1, 3),
    )


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
