"""The clock of the training loop."""

import jax.monitoring
import pytest

from clover_jax.runtime import compile_clock
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.training.trainer import Clock


@pytest.fixture
def now(monkeypatch):
    """A clock in a list, so that no test depends on how fast the machine is."""
    time = [100.0]
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: time[0])
    return time


def test_tokens_per_second_leave_out_compiling_and_pauses(now):
    with CompileClock() as compiling:
        clock = Clock(compiling)
        with clock.waiting():
            now[0] += 1
        now[0] += 50  # the first step
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", 46.0)
        clock.count(100)
        with clock.paused():
            now[0] += 30  # a measurement, which compiles too
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", 20.0)
        assert clock.read() == pytest.approx((20.0, 0.2))
        now[0] += 2
        clock.count(100)
        assert clock.read() == pytest.approx((50.0, 0.0))
