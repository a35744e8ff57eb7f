"""What is shown while rows are decoded."""

import io
from types import SimpleNamespace

import pytest

from clover_jax.generation import output
from clover_jax.generation.output import DecodingClock, RowPrinter, decode_with_bar
from clover_jax.generation.row_stream import RowEvent
from clover_jax.generation.row_totals import RowTotals
from clover_jax.runtime.progress import progress_bar

ROW = {"index": 0, "output_ids": [1] * 20, "accepted": [1] * 10, "finish_reason": "length"}


@pytest.mark.parametrize("compiled", [0.0, 8.0])
def test_neither_the_rate_nor_the_clock_counts_compilation(monkeypatch, compiled):
    now, compiling, shown = [100.0], SimpleNamespace(seconds=5.0), io.StringIO()
    monkeypatch.setattr(output.time, "perf_counter", lambda: now[0])
    clock = DecodingClock(compiling)

    def stream():
        now[0] += 2.0 + compiled
        compiling.seconds += compiled
        yield RowEvent(None, row=ROW)

    with progress_bar(1, "generate", "row", file=shown) as bar:
        decode_with_bar(stream(), RowPrinter(quiet=True), RowTotals(), bar, clock)
    assert clock.seconds == 2.0
    assert "10 tokens/s" in shown.getvalue()
