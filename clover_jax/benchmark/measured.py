"""`bench`: time a plain and a speculative step, and all parts of the latter, alternating."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax

from clover_jax.array_types import Params
from clover_jax.benchmark.ceilings import Ceilings, measure_ceilings
from clover_jax.benchmark.engine_run import EngineRun
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.errors import UserError
from clover_jax.loading.decode_states import cache_size, fitting_context
from clover_jax.loading.models import Models, load
from clover_jax.loading.spec import ModelSpec
from clover_jax.models.int8 import Int8Matrix
from clover_jax.pretrained.shapes import base_shapes
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import passing_note
from clover_jax.runtime.provenance import compiler_versions
from clover_jax.timing.loops import STEPS
from clover_jax.timing.parts import Bench, Part, chunk_run, stage_parts, step_part
from clover_jax.timing.turns import WARM_UP, time_in_turns
from clover_jax.tree_search.race import with_attention
from clover_jax.xla.program_costs import STAGES


@dataclasses.dataclass(frozen=True)
class TimedPart:
    """A part's seconds, and the least that its work takes on this machine.

    num_bytes: read of weights and caches; the floor is theirs or that of the products.
    """

    seconds: float
    floor: float
    num_bytes: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Seconds in floors; None for a part without products."""
        return self.seconds / self.floor if self.floor else None


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """The times of one batch size, context and tree.

    parts: by name; "plain step", "step" and "draft" among them.
    engine_step: seconds a step in the engine. chunk_step: the same without the host's reads.
    """

    ceilings: Ceilings
    parts: dict[str, TimedPart]
    engine_step: float
    chunk_step: float

    @property
    def sum_of_parts(self) -> float:
        """Seconds of all stages, each timed by itself."""
        return sum(self.parts[name].seconds for name in STAGES if name in self.parts)

    @property
    def step_over_sum(self) -> float:
        """The whole step in sums of its parts."""
        return self.parts["step"].seconds / self.sum_of_parts

    @property
    def host_overhead(self) -> float:
        """The share of a step that the engine's looks at the text add to it."""
        return self.engine_step / self.chunk_step - 1

    @property
    def break_even(self) -> float:
        """Drafted tokens that a step must accept to be as fast as plain decoding."""
        return self.parts["step"].seconds / self.parts["plain step"].seconds - 1

    @property
    def plain_bandwidth(self) -> float:
        """Share of the measured bandwidth that a plain step uses."""
        plain = self.parts["plain step"]
        return plain.num_bytes / self.ceilings.bandwidth / plain.seconds

    def lines(self, force_accept: int | None) -> list[str]:
        """Return the table and the summary, line by line."""
        lines = [
            f"bandwidth {self.ceilings.bandwidth / 1e9:.1f} GB/s, matrix products "
            f"{self.ceilings.matrix_rate / 1e9:.0f} GFLOP/s",
            f"{'part':<18}{'ms':>10}{'floor ms':>10}{'x floor':>9}",
        ]

        # In the order of a step, with a draft's levels under the whole of it.
        levels = [name for name in self.parts if name.startswith("draft level")]
        order = ["plain step", "step", "absorb", "draft", *levels, *STAGES[2:]]
        for name in order:
            if name in self.parts:
                part = self.parts[name]
                floor = f"{1e3 * part.floor:10.3f}{part.ratio:9.2f}" if part.ratio else ""
                lines.append(f"{name:<18}{1e3 * part.seconds:10.3f}{floor}")

        accepted = "" if force_accept is None else f" (forced to accept {force_accept})"
        return [
            *lines,
            f"a plain step uses {self.plain_bandwidth:.0%} of the bandwidth",
            f"a step{accepted} takes {self.step_over_sum:.2f} x the sum of its parts, "
            f"{1e3 * self.sum_of_parts:.3f} ms",
            f"in the engine {1e3 * self.engine_step:.3f} ms a step, without its looks at the text "
            f"{1e3 * self.chunk_step:.3f} ms: {self.host_overhead:+.1%} for the host",
            f"as fast as plain decoding at {self.break_even:.2f} accepted tokens a step",
        ]

    def to_row(self) -> dict[str, Any]:
        """Return the figures as JSON, times in milliseconds."""
        parts = {
            name: {
                "ms": round(1e3 * part.seconds, 4),
                "floor_ms": round(1e3 * part.floor, 4),
                "over_floor": part.ratio and round(part.ratio, 3),  # None without products
            }
            for name, part in self.parts.items()
        }

        return {
            "bandwidth_gb_s": round(self.ceilings.bandwidth / 1e9, 2),
            "matrix_gflop_s": round(self.ceilings.matrix_rate / 1e9, 1),
            "parts": parts,
            "plain_step_share_of_bandwidth": round(self.plain_bandwidth, 3),
            "sum_of_parts_ms": round(1e3 * self.sum_of_parts, 4),
            "step_over_sum_of_parts": round(self.step_over_sum, 3),
            "engine_step_ms": round(1e3 * self.engine_step, 4),
            "chunk_step_ms": round(1e3 * self.chunk_step, 4),
            "host_overhead": round(self.host_overhead, 4),
            "break_even_accepted": round(self.break_even, 3),
        }


def measure_and_describe(
    spec: ModelSpec,
    *,
    batch: int,
    context: int | None,
    rounds: int,
    force_accept: int | None,
) -> dict[str, Any]:
    """Time a step and its parts, print the table, return all of it as JSON values.

    context: None takes what fits, see `fitting_context`.
    Raises UserError as `load` and `measure` do.
    """
    with passing_note(f"loading {spec.base}"):
        models = load(spec)
    # Copies are there only where the text repeats, so none can be forced.
    drafted = models.tree.levels_within(models.head.config.max_depth if models.head else None)
    if force_accept is not None and force_accept > drafted:
        what = "path that a head drafts in" if models.copies else "path of"
        raise UserError(
            f"--force_accept={force_accept}: no {what} the tree {models.tree.name} has more than "
            f"{drafted} nodes"
        )

    # The engine's rows grow while they are timed, so they need room behind the context.
    context = context or fitting_context(models, room_for(models, rounds, force_accept))
    # As `generate` does: --attention=auto is measured at this batch size.
    models = with_attention(models, spec.attention, batch)
    with (
        passing_note("measuring"),
        exact_matmuls(str(models.dtype)),
        CompileClock() as compiling,
    ):
        timed = measure(models, batch, context, rounds, force_accept)
    print("\n".join(timed.lines(force_accept)))
    settings = {
        "batch_size": batch,
        "context": context,
        "rounds": rounds,
        "force_accept": force_accept,
        "compile_seconds": round(compiling.seconds, 2),
        "peak_memory_gb": _peak_memory(),
    }
    return describe_run(models, spec) | settings | timed.to_row()


def describe_run(models: Models, spec: ModelSpec) -> dict[str, Any]:
    """Return the measured models by the names of the command's flags, their sizes, the device."""
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    return {
        "base": spec.base,
        "draft": spec.draft,
        "tree": models.tree.name,
        "dtype": str(models.dtype),
        "int8": list(models.int8),
        "attention": models.attention,
        # The base's own: --int8 and a reduced vocabulary add copies of lm_head to its weights.
        "base_parameters": _count(base_shapes(models.base.config, models.dtype)),
        "draft_parameters": _count(models.draft_params),
        "device": f"cpu ({jax.device_count()} device)" if is_cpu else device.device_kind,
        "versions": compiler_versions(),
    }


def _count(params: Params | None) -> int:
    """Return the number of parameters; the steps of a quantized matrix are none."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Int8Matrix))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _peak_memory() -> float | None:
    """Return the most memory of the device that was in use, in GB; None where it counts none."""
    counted = jax.devices()[0].memory_stats() or {}
    return round(counted["peak_bytes_in_use"] / 1e9, 3) if "peak_bytes_in_use" in counted else None


def measure(
    models: Models, batch: int, context: int, rounds: int, force_accept: int | None
) -> TimedStep:
    """Time everything; force_accept: drafted tokens that every step accepts, None for no force.

    Raises UserError where the tree does not suit the head, or the context the base.
    """
    sampling = SamplingConfig(force_accept=force_accept)
    pace = known_pace(models, force_accept)
    room = room_for(models, rounds, force_accept)
    size = cache_size(models, context, room)

    # A plain step beside a step, its stages, a chunk of steps and the engine's own loop.
    speculative = Bench(models, batch, size, context)
    parts = {"plain step": step_part(Bench(models.plain(), batch, size, context))}
    if models.head is not None:
        parts |= {"step": step_part(speculative, sampling)} | stage_parts(speculative, sampling)
    runs = {name: part.run for name, part in parts.items()}
    # A chunk has the engine's steps without the host; the difference is the host's share.
    runs["chunk"] = chunk_run(speculative, sampling)
    engine = EngineRun(models, sampling, batch)
    runs["engine"] = engine.chunks(context, context + room, rounds, pace)
    seconds = time_in_turns(runs, rounds, single=["engine"])  # its calls advance in the text

    ceilings = measure_ceilings(models.dtype)
    timed = {name: _timed(part, seconds[name], ceilings) for name, part in parts.items()}
    if models.head is None:  # a step is a plain step, and verifies its root alone
        timed["step"] = timed["verify"] = timed["plain step"]
    else:
        timed |= _levels(timed, models.levels)
    # A call of the engine, and of the chunk, is STEPS steps.
    return TimedStep(ceilings, timed, seconds["engine"] / STEPS, seconds["chunk"] / STEPS)


def room_for(models: Models, rounds: int, force_accept: int | None) -> int:
    """Return the positions that the engine's rows take while they are timed; none may end."""
    # Every call, to warm up or timed, is a chunk of steps; there is room for one more.
    pace = known_pace(models, force_accept) or models.tree.depth + 1
    return (rounds + WARM_UP + 1) * STEPS * pace


def known_pace(models: Models, force_accept: int | None) -> int | None:
    """Return the most tokens that a row emits in a step; None where drafts decide."""
    # Without a tree every step emits the base's own token alone.
    accepted = force_accept if models.tree.num_nodes else 0
    return None if accepted is None else accepted + 1


def _timed(part: Part, seconds: float, ceilings: Ceilings) -> TimedPart:
    # Bytes that a part must read: the floor leaves out what it writes.
    num_bytes = part.work.weight_bytes + part.cache_bytes
    floor = max(num_bytes / ceilings.bandwidth, part.work.flops / ceilings.matrix_rate)
    return TimedPart(seconds, floor, num_bytes)


def _levels(timed: Mapping[str, TimedPart], depth: int) -> dict[str, TimedPart]:
    """Return the whole draft under its own name, and the difference that each level makes."""
    whole = [timed[f"draft to level {level}"] for level in range(1, depth + 1)]
    pairs = itertools.pairwise([TimedPart(0.0, 0.0), *whole])  # without the level, and with it
    levels = {
        f"draft level {index}": TimedPart(part.seconds - less.seconds, part.floor - less.floor)
        for index, (less, part) in enumerate(pairs, start=1)
    }
    return {"draft": whole[-1]} | levels
