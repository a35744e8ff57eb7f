"""`bench --sweep`: the cost of verification by batch size and nodes, and when speculation pays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.decoding.decode_states import cache_size, fitting_context
from clover_jax.decoding.models import Models, load
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree import TokenTree
from clover_jax.errors import UserError
from clover_jax.evaluation.loops import draft_loop, step_loop, steps_at_once, verify_loop
from clover_jax.evaluation.measured import describe_run
from clover_jax.evaluation.parts import Bench
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.turns import Run, time_in_turns


def sweep_and_describe(
    spec: ModelSpec,
    *,
    batch_sizes: Sequence[int],
    nodes: Sequence[int],
    context: int | None,
    rounds: int,
) -> dict[str, Any]:
    """Time batch sizes and tree sizes, print the table, return it as JSON values.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `load` and `sweep` do.
    """
    with passing_note(f"loading {spec.base}"):
        models = load(spec)
    context = context or fitting_context(models, room=0)
    # In float32 products are exact, as they are when rows are decoded.
    with passing_note("measuring"), exact_matmuls(str(models.dtype)):
        cells = sweep(models, batch_sizes, nodes, context, rounds)

    lines = [
        f"drafting as for tree {models.tree.name}",
        f"{'batch':>5}{'nodes':>7}{'plain ms':>10}{'verify ms':>11}{'x plain':>9}"
        f"{'draft ms':>10}{'break-even':>12}",
    ]
    for batch, count, plain, verify, draft, break_even in (cell.values() for cell in cells):
        lines.append(
            f"{batch:>5}{count:>7}{plain:>10.3f}{verify:>11.3f}{verify / plain:>9.2f}{draft:>10.3f}"
            f"{break_even:>12.2f}"
        )
    print("\n".join(lines))
    return describe_run(models, spec) | {"context": context, "rounds": rounds, "cells": cells}


def sweep(
    models: Models, batch_sizes: Sequence[int], nodes: Sequence[int], context: int, rounds: int
) -> list[dict[str, Any]]:
    """Time every batch size with every number of nodes, in milliseconds.

    A cell has the draft of the models' tree and the verification of a tree of `nodes` nodes.
    break_even: drafted tokens that such a step must accept to be as fast as plain decoding.
    Raises UserError for a base alone, which has nothing to verify.
    """
    if models.head is None:
        raise UserError("--sweep needs a draft; give --draft=random:clover2 or a folder")
    config, slots = models.step(), models.tree.num_slots  # raises if the head cannot draft the tree
    size = cache_size(models, context, room=0)
    placement = Placement(models.mesh)

    cells = []
    for batch in batch_sizes:
        bench = Bench(models, batch, size, context)
        plain = Bench(models.plain(), batch, size, context)
        plain_step = functools.partial(step_loop, plain.models.step())
        runs: dict[str, Run] = {
            "plain": plain.updating(plain_step).run,
            "step": bench.updating(functools.partial(step_loop, config)).run,
            "draft": bench.updating(functools.partial(draft_loop, config)).run,
        }
        for count in sorted({slots, *(each + 1 for each in nodes)}):  # the root is a slot too
            runs[f"verify {count}"] = _verifying(bench, batch, count)
        with placement.in_use():
            timed = time_in_turns(runs, rounds)

        ms = {name: 1e3 * seconds / steps_at_once() for name, seconds in timed.items()}
        # The rest of a step, accepting and committing, is a small difference: noise may make it
        # negative.
        rest = max(ms["step"] - ms["draft"] - ms[f"verify {slots}"], 0.0)
        for count in nodes:
            step = ms["draft"] + ms[f"verify {count + 1}"] + rest
            cells.append(
                {
                    "batch_size": batch,
                    "nodes": count,
                    "plain_ms": round(ms["plain"], 4),
                    "verify_ms": round(ms[f"verify {count + 1}"], 4),
                    "draft_ms": round(ms["draft"], 4),
                    # A step as long as n plain ones must emit n tokens; one is the base's own.
                    "break_even": round(step / ms["plain"] - 1, 3),
                }
            )
    return cells


def _verifying(bench: Bench, batch: int, count: int) -> Run:
    """Return the base's forward over `count` slots: a root and its children."""
    models = bench.models
    tokens = jax.random.randint(
        jax.random.key(3), (batch, count), 0, models.base.config.vocab_size, jnp.int32
    )
    # The parent of the root is -1, all other slots are its children.
    parent = jnp.where(jnp.arange(count) == 0, -1, 0)[None]
    tree = TokenTree(tokens, parent, depth=1)
    return bench.reading(functools.partial(verify_loop, models.step()), tree).run
