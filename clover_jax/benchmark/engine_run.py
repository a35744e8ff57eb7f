"""The engine's own loop as something to time: one call is one chunk of steps of all rows."""

from __future__ import annotations

from collections.abc import Iterator

from clover_jax.benchmark.subject import Subject
from clover_jax.benchmark.timing import Run
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Progress, Request
from clover_jax.decoding.sampling import SamplingConfig


def engine_chunk(
    subject: Subject, sampling: SamplingConfig, batch: int, context: int, steps: int, room: int
) -> Run:
    """Return a function that lets an engine with full slots run its next chunk.

    Every row has `context` tokens of prompt, and `room` tokens to emit: the caller sees to it that
    no row ends while chunks are timed.
    """
    engine = Engine(
        subject.base,
        subject.head,
        subject.tree,
        sampling,
        batch_size=batch,
        steps_per_chunk=steps,
    )
    prompt = [index % subject.base.vocab_size for index in range(1, context + 1)]
    requests = [Request(index, prompt, room) for index in range(batch)]
    stream = engine.stream(subject.weights.base, subject.weights.draft, requests)
    return lambda: _take(stream, batch)


def _take(stream: Iterator[Progress], batch: int) -> list[list[int]]:
    """Return the new tokens of every row, which are on the host by then."""
    return [next(stream).new_ids for _ in range(batch)]
