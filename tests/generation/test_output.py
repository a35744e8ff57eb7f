"""What is shown while rows are decoded."""

import io

import jax.monitoring
import pytest

from clover_jax.generation.output import decode_with_bar
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.row_totals import RowTotals
from clover_jax.runtime import compile_clock
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import progress_bar
from clover_jax.storage.row_writer import RowSink

ROW = {"index": 0, "output_ids": [1] * 20, "accepted": [1] * 10, "finish_reason": "length"}


@pytest.mark.parametrize("compiled", [0.0, 8.0])
def test_neither_the_rate_nor_the_clock_counts_compilation(monkeypatch, compiled):
    now, shown = [100.0], io.StringIO()
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: now[0])

    def stream():
        now[0] += 2.0 + compiled
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", compiled)
        yield RowEvent(None, row=ROW)

    sink = RowSink()
    with CompileClock() as compiling, progress_bar(1, "generate", "row", file=shown) as bar:
        decode_with_bar(stream(), sink, RowTotals(), bar, compiling)
    assert compiling.now() == 102.0
    assert "10 tokens/s" in shown.getvalue()
