"""`bench`: time a plain and a speculative step, and all parts of the latter, alternating.

`--sweep`: the cost of verification by batch size and nodes, and when speculation pays.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Params
from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.decoding.models import Models, cache_size, fitting_context, load
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.race import with_attention
from clover_jax.decoding.requests import Generation, Request, RowUpdate
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree import TokenTree
from clover_jax.errors import UserError
from clover_jax.evaluation.compiled import named_settings
from clover_jax.evaluation.parts import (
    STEPS,
    Bench,
    chunk_run,
    draft_loop,
    stage_parts,
    step_loop,
    step_part,
    steps_at_once,
    verify_loop,
)
from clover_jax.models.int8 import Int8Matrix
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.provenance import compiler_versions
from clover_jax.runtime.turns import WARM_UP, Run, time_in_turns

STAGES = ("absorb", "draft", "verify", "accept", "commit")
READ_BYTES = 256 * 2**20  # far beyond any cache
COPY_BYTES = 2**30
CEILING_ROUNDS = 7


def measure_and_describe(
    spec: ModelSpec, *, batch: int, context: int | None, rounds: int, force_accept: int | None
) -> dict[str, Any]:
    """Time a step and its parts, print the table, return all of it as JSON values.

    context: None takes what fits, see `fitting_context`.
    """
    with passing_note(f"loading {spec.base}"):
        models = load(spec)
    # Copies exist only where the text repeats, so they cannot be forced.
    drafted = models.tree.levels_within(models.head.config.max_depth if models.head else None)
    if force_accept is not None and force_accept > drafted:
        what = "path that a head drafts in" if models.copies else "path of"
        raise UserError(
            f"--force_accept={force_accept}: no {what} the tree {models.tree.name} has more than "
            f"{drafted} nodes"
        )

    # The engine's rows grow while they are timed, so they need room after the context.
    context = context or fitting_context(models, room_for(models, rounds, force_accept))
    # As in `generate`: --attention=auto is measured at this batch size.
    models = with_attention(models, spec.attention, batch)
    with passing_note("measuring"), exact_matmuls(str(models.dtype)), CompileClock() as compiling:
        timed = measure(models, batch, context, rounds, force_accept)
    print("\n".join(table(timed, force_accept)))

    # CPUs do not count their memory.
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    settings = {
        "batch_size": batch,
        "context": context,
        "rounds": rounds,
        "force_accept": force_accept,
        "compile_seconds": round(compiling.seconds, 2),
        "peak_memory_gb": None if peak is None else round(peak / 1e9, 3),
    }
    return describe_run(models, spec) | settings | timed


def describe_run(models: Models, spec: ModelSpec) -> dict[str, Any]:
    """Return the models under the names of the command's flags, their sizes, the device."""
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"

    def count(params: Params | None) -> int:
        # The scales of a quantized matrix are not parameters.
        leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Int8Matrix))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    return named_settings(models, spec) | {
        # From the config: --int8 and a reduced vocabulary add copies of lm_head to the weights.
        "base_parameters": count(base_shapes(models.base.config, models.dtype)),
        "draft_parameters": count(models.draft_params),
        "device": f"cpu ({jax.device_count()} device)" if is_cpu else device.device_kind,
        "versions": compiler_versions(),
    }


def measure(
    models: Models, batch: int, context: int, rounds: int, force_accept: int | None
) -> dict[str, Any]:
    """Return the times of a plain step, a step, its parts and a step in the engine, as JSON values.

    force_accept: drafted tokens that every step accepts; None does not force any. A part's floor
    is the time of the bytes that it must read, or of its products, on this machine.
    """
    sampling = SamplingConfig(force_accept=force_accept)
    room = room_for(models, rounds, force_accept)
    size = cache_size(models, context, room)

    # A plain step, a step, its stages, a chunk of steps and the engine's own loop.
    speculative = Bench(models, batch, size, context)
    parts = {"plain step": step_part(Bench(models.plain(), batch, size, context))}
    if models.head is not None:
        parts |= {"step": step_part(speculative, sampling)} | stage_parts(speculative, sampling)
    runs = {name: part.run for name, part in parts.items()}
    # A chunk has the engine's steps without the host; the difference is the host's share.
    runs["chunk"] = chunk_run(speculative, sampling)
    pace = known_pace(models, force_accept)
    runs["engine"] = engine_run(models, sampling, batch, context, context + room, rounds, pace)
    seconds = time_in_turns(runs, rounds, single=["engine"])  # its calls advance in the text

    limits = measure_ceilings(models.dtype)
    read = {name: part.work.weight_bytes + part.cache_bytes for name, part in parts.items()}
    floors = {
        name: max(read[name] / limits.bandwidth, part.work.flops / limits.matrix_rate)
        for name, part in parts.items()
    }
    if models.head is None:  # a step is a plain step, and verifies its root alone
        seconds["step"] = seconds["verify"] = seconds["plain step"]
        floors["step"] = floors["verify"] = floors["plain step"]
    else:
        # The whole draft under its own name, and the difference that each level makes.
        levels = range(1, models.levels + 1)
        for times in (seconds, floors):
            whole = [times[f"draft to level {level}"] for level in levels]
            pairs = enumerate(itertools.pairwise([0.0, *whole]), start=1)
            times |= {f"draft level {level}": more - less for level, (less, more) in pairs}
            times["draft"] = whole[-1]

    plain, step = seconds["plain step"], seconds["step"]
    sum_of_parts = sum(seconds[name] for name in STAGES if name in floors)
    return {
        "bandwidth_gb_s": round(limits.bandwidth / 1e9, 2),
        "matrix_gflop_s": round(limits.matrix_rate / 1e9, 1),
        "parts": {
            name: {
                "ms": round(1e3 * seconds[name], 4),
                "floor_ms": round(1e3 * floor, 4),
                # A part without products has no floor.
                "over_floor": round(seconds[name] / floor, 3) if floor else None,
            }
            for name, floor in floors.items()
        },
        "plain_step_share_of_bandwidth": round(read["plain step"] / limits.bandwidth / plain, 3),
        "sum_of_parts_ms": round(1e3 * sum_of_parts, 4),
        "step_over_sum_of_parts": round(step / sum_of_parts, 3),
        # A call of the engine, and of the chunk, is STEPS steps.
        "engine_step_ms": round(1e3 * seconds["engine"] / STEPS, 4),
        "chunk_step_ms": round(1e3 * seconds["chunk"] / STEPS, 4),
        "host_overhead": round(seconds["engine"] / seconds["chunk"] - 1, 4),
        # Drafted tokens that a step must accept to be as fast as plain decoding.
        "break_even_accepted": round(step / plain - 1, 3),
    }


def table(timed: dict[str, Any], force_accept: int | None) -> list[str]:
    """Return the lines that show what `measure` returned."""
    lines = [
        f"bandwidth {timed['bandwidth_gb_s']:.1f} GB/s, matrix products "
        f"{timed['matrix_gflop_s']:.0f} GFLOP/s",
        f"{'part':<18}{'ms':>10}{'floor ms':>10}{'x floor':>9}",
    ]

    # In the order of a step, with a draft's levels below the whole of it.
    parts = timed["parts"]
    levels = [name for name in parts if name.startswith("draft level")]
    for name in ["plain step", "step", "absorb", "draft", *levels, *STAGES[2:]]:
        if name in parts:
            ms, floor, ratio = parts[name].values()
            floor = f"{floor:10.3f}{ratio:9.2f}" if ratio else ""
            lines.append(f"{name:<18}{ms:10.3f}{floor}")

    accepted = "" if force_accept is None else f" (forced to accept {force_accept})"
    return [
        *lines,
        f"a plain step uses {timed['plain_step_share_of_bandwidth']:.0%} of the bandwidth",
        f"a step{accepted} takes {timed['step_over_sum_of_parts']:.2f} x the sum of its parts, "
        f"{timed['sum_of_parts_ms']:.3f} ms",
        f"in the engine {timed['engine_step_ms']:.3f} ms a step, {timed['chunk_step_ms']:.3f} ms "
        f"if the host does not read the text: {timed['host_overhead']:+.1%} for the host",
        f"as fast as plain decoding at {timed['break_even_accepted']:.2f} accepted tokens a step",
    ]


def room_for(models: Models, rounds: int, force_accept: int | None) -> int:
    """Return the positions that the engine's rows take while they are timed; none may end."""
    # Every call, warm-up or timed, is a chunk of steps; there is room for one more.
    pace = known_pace(models, force_accept) or models.tree.depth + 1
    return (rounds + WARM_UP + 1) * STEPS * pace


def known_pace(models: Models, force_accept: int | None) -> int | None:
    """Return the most tokens that a row emits in a step; None if the drafts decide."""
    # Without a tree every step emits the base's own token alone.
    accepted = force_accept if models.tree.num_nodes else 0
    return None if accepted is None else accepted + 1


def engine_run(
    models: Models,
    sampling: SamplingConfig,
    batch: int,
    context: int,
    end: int,
    rounds: int,
    pace: float | None,
) -> Run:
    """Return a function that runs the engine's next chunk of steps, its rows going on in the text.

    For `time_in_turns` with `rounds` rounds; the middle one begins at `context`.
    end: positions at which rows would end. The caller makes sure that none does while chunks are
        timed; buffers are as long as `cache_size` returns for `end` positions.
    pace: tokens that a row emits in a step; None measures it first, in WARM_UP chunks.
    """
    engine = models.engine(batch, sampling, steps_per_chunk=STEPS)

    def started(length: int) -> Generator[RowUpdate]:
        # Any prompt will do, the same in every slot.
        prompt = [index % models.base.config.vocab_size for index in range(1, length + 1)]
        requests = [Request(index, prompt, end - length) for index in range(batch)]
        return engine.stream(models.weights.base, models.weights.draft, requests)

    def chunk(stream: Generator[RowUpdate]) -> list[Generation]:
        # Every row's tokens are on the host by then.
        return [next(stream).row for _ in range(batch)]

    if pace is None:
        stream = started(context)
        rows = [chunk(stream) for _ in range(WARM_UP)][-1]
        stream.close()
        pace = 1 + statistics.mean(count for row in rows for count in row.accepted)
    # Prompts are shorter than `context` by what the rounds before the middle one emit.
    before = round((WARM_UP + rounds // 2) * STEPS * pace)
    return functools.partial(chunk, started(max(context - before, 1)))


class Ceilings(NamedTuple):
    """Measured limits: bytes a second, and operations a second of a large product.

    bandwidth: on CPU of one thread that reads, because one thread does a one-token forward there;
        elsewhere of a copy on the device, read and written.
    """

    bandwidth: float
    matrix_rate: float


def measure_ceilings(dtype: jnp.dtype) -> Ceilings:
    """Measure this machine."""
    is_cpu = jax.default_backend() == "cpu"
    runs: dict[str, Run]
    if is_cpu:
        # The fastest of several reductions by numpy, each in one thread: which of them keeps up
        # with the memory differs from machine to machine.
        floats = np.ones(READ_BYTES // 4, np.float32)
        words, moved = floats.view(np.uint64), READ_BYTES
        join = functools.partial(np.bitwise_or.reduce, words)
        runs = {"max": functools.partial(np.max, floats), "or": join, "sum": words.sum}
    else:
        # An addition reads and writes every byte; the compiler may leave out a plain copy.
        source, moved = jnp.zeros(COPY_BYTES // 4, jnp.float32), 2 * COPY_BYTES
        runs = {"copy": functools.partial(jax.jit(lambda x: x + 1.0), source)}
    bandwidth = moved / min(time_in_turns(runs, CEILING_ROUNDS).values())

    # Sums in float32, as in the step's products.
    size = 1536 if is_cpu else 8192
    multiply = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    matrix = jnp.ones((size, size), dtype)
    product: dict[str, Run] = {"product": functools.partial(multiply, matrix, matrix)}
    (seconds,) = time_in_turns(product, CEILING_ROUNDS).values()
    return Ceilings(bandwidth, 2 * size**3 / seconds)  # a product and a sum are two operations


def sweep_and_describe(
    spec: ModelSpec, *, batch_sizes: list[int], nodes: list[int], context: int | None, rounds: int
) -> dict[str, Any]:
    """Time batch sizes and tree sizes, print the table, return it as JSON values.

    context: None takes what fits, see `fitting_context`.
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
            # The base's forward over a root, whose parent is -1, and its children.
            shape, vocabulary = (batch, count), models.base.config.vocab_size
            tokens = jax.random.randint(jax.random.key(3), shape, 0, vocabulary, jnp.int32)
            tree = TokenTree(tokens, jnp.where(jnp.arange(count) == 0, -1, 0)[None], depth=1)
            verify = functools.partial(verify_loop, config)
            runs[f"verify {count}"] = bench.reading(verify, tree).run
        with Placement(models.mesh).in_use():
            timed = time_in_turns(runs, rounds)

        ms = {name: 1e3 * seconds / steps_at_once() for name, seconds in timed.items()}
        # The rest of a step is a small difference, which noise may make negative.
        rest = max(ms["step"] - ms["draft"] - ms[f"verify {slots}"], 0.0)
        for count in nodes:
            runs_of = {"plain": "plain", "verify": f"verify {count + 1}", "draft": "draft"}
            times = {name: ms[run] for name, run in runs_of.items()}
            cell = {f"{name}_ms": round(each, 4) for name, each in times.items()}
            step = times["draft"] + times["verify"] + rest
            # A step as long as n plain ones must emit n tokens; one is the base's own.
            cell["break_even"] = round(step / times["plain"] - 1, 3)
            cells.append({"batch_size": batch, "nodes": count} | cell)
    return cells
