"""A clock of JAX's tracing and compiling, to subtract it from measured times."""

from __future__ import annotations

import threading
import time

import jax.monitoring

_COMPILING = "/jax/core/compile/"


class CompileClock:
    """Measures, as a context manager, the seconds in which its thread made programs."""

    def __init__(self):
        """Start from zero; nothing counts before the context is entered."""
        self._spans: list[tuple[float, float]] = []
        self._thread = 0

    @property
    def seconds(self) -> float:
        """Seconds of tracing, lowering and compiling so far; what overlaps counts once."""
        return self.seconds_since(0.0)

    def seconds_since(self, start: float) -> float:
        """Return such seconds after `start`, a time of `time.perf_counter`."""
        # Tracing one function may trace and compile others within: spans nest and overlap.
        total, counted_until = 0.0, start
        # Sorted by start; each span counts from where the spans before it have ended.
        for start, end in sorted(self._spans):
            total += max(end - max(start, counted_until), 0.0)
            counted_until = max(counted_until, end)
        return total

    def now(self) -> float:
        """Return a time in seconds that stands still while programs are made."""
        return time.perf_counter() - self.seconds

    def __enter__(self) -> CompileClock:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **details: str | int) -> None:
        # JAX reports a span at its end.
        if event.startswith(_COMPILING) and threading.get_ident() == self._thread:
            now = time.perf_counter()
            # A span ends after the spans within it, which it replaces.
            while self._spans and self._spans[-1][0] >= now - duration_secs:
                self._spans.pop()
            self._spans.append((now - duration_secs, now))
