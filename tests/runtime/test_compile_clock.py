"""Compiling is told apart from working."""

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from clover_jax.runtime import compile_clock
from clover_jax.runtime.compile_clock import CompileClock

EVENT = "/jax/core/compile/backend_compile_duration"


def test_a_second_call_compiles_nothing():
    program, x = jax.jit(lambda x: jnp.sin(x) @ x), jnp.ones((3, 3))
    with CompileClock() as clock:
        program(x)
    first = clock.seconds
    assert first > 0
    program(x + 1)  # outside: does not count
    with CompileClock() as clock:
        program(x)
    assert clock.seconds == 0


def test_what_overlaps_counts_once(monkeypatch):
    now = iter([3.0, 5.0, 9.0])
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: next(now))
    with CompileClock() as clock:
        jax.monitoring.record_event_duration_secs(EVENT, 1.0)  # 2 to 3
        jax.monitoring.record_event_duration_secs(EVENT, 4.0)  # 1 to 5
        jax.monitoring.record_event_duration_secs(EVENT, 2.0)  # 7 to 9
        jax.monitoring.record_event_duration_secs("/jax/other", 2.0)
    assert clock.seconds == pytest.approx(6)
