"""Time a plain and a speculative step, and all parts of the latter, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from clover_jax.benchmark.ceilings import Ceilings, measure_ceilings
from clover_jax.benchmark.engine_run import EngineRun
from clover_jax.decoding.sampling import SamplingConfig
from clover_jax.loading.subject import Subject, cache_size, running_state
from clover_jax.timing.loops import STEPS
from clover_jax.timing.parts import Bench, Part, chunk_run, stage_parts, step_part
from clover_jax.timing.turns import WARM_UP, time_in_turns

STAGES = ("absorb", "draft", "verify", "accept", "commit")


@dataclasses.dataclass(frozen=True)
class Timed:
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
class Measurement:
    """What was timed for one batch size, context and tree.

    parts: by name; "plain step", "step" and "draft" among them.
    engine_step: seconds a step in the engine. chunk_step: the same without its looks at the text.
    """

    ceilings: Ceilings
    parts: dict[str, Timed]
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
        """What the engine's looks at the text add to a step, as a share of it."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, times in milliseconds."""
        parts = {
            name: {
                "ms": round(1e3 * part.seconds, 4),
                "floor_ms": round(1e3 * part.floor, 4),
                "over_floor": part.ratio and round(part.ratio, 3),
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


def measure(
    subject: Subject, batch: int, context: int, rounds: int, force_accept: int | None
) -> Measurement:
    """Time everything; force_accept: drafted tokens that every step accepts, None for what it does.

    Raises UserError where the tree does not suit the head, or the context the base.
    """
    sampling = SamplingConfig(force_accept=force_accept)
    pace = known_pace(subject, force_accept)
    room = room_for(subject, rounds, force_accept)
    size = cache_size(subject, context, room)
    speculative = Bench(subject, running_state(subject, batch, size, context), context)
    plain_subject = subject.plain()
    plain = Bench(plain_subject, running_state(plain_subject, batch, size, context), context)
    parts = {"plain step": step_part(plain)}
    if subject.head is not None:
        parts |= {"step": step_part(speculative, sampling)} | stage_parts(speculative, sampling)
    runs = {name: part.run for name, part in parts.items()}
    runs["chunk"] = chunk_run(speculative, sampling)
    engine = EngineRun(subject, sampling, batch, STEPS)
    runs["engine"] = engine.chunks(context, context + room, rounds, pace)
    seconds = time_in_turns(runs, rounds, single=["engine"])
    ceilings = measure_ceilings(subject.dtype)
    timed = {name: _timed(part, seconds[name], ceilings) for name, part in parts.items()}
    if subject.head is None:
        timed["step"] = timed["verify"] = timed["plain step"]
    else:
        timed |= _levels(timed, subject.levels)
    return Measurement(ceilings, timed, seconds["engine"] / STEPS, seconds["chunk"] / STEPS)


def room_for(subject: Subject, rounds: int, force_accept: int | None) -> int:
    """Return how many positions the engine's rows go on while they are timed; none may end."""
    pace = known_pace(subject, force_accept) or subject.tree.depth + 1
    return (rounds + WARM_UP + 1) * STEPS * pace


def known_pace(subject: Subject, force_accept: int | None) -> int | None:
    """Return how many tokens a row emits in a step, at most; None where drafts decide."""
    accepted = force_accept if subject.tree.num_nodes else 0
    return None if accepted is None else accepted + 1


def _timed(part: Part, seconds: float, ceilings: Ceilings) -> Timed:
    num_bytes = part.work.weight_bytes + part.cache_bytes
    return Timed(seconds, ceilings.floor(num_bytes, part.work.flops), num_bytes)


def _levels(timed: Mapping[str, Timed], depth: int) -> dict[str, Timed]:
    """Return what each level adds, and the whole draft under its own name."""
    whole = [timed[f"draft to level {level}"] for level in range(1, depth + 1)]
    below = [Timed(0.0, 0.0), *whole]
    levels = {
        f"draft level {index}": Timed(part.seconds - less.seconds, part.floor - less.floor)
        for index, (part, less) in enumerate(zip(whole, below, strict=False), start=1)
    }
    return {"draft": whole[-1]} | levels
