"""A figure that was measured several times."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Self


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median, the least and the most of repeated measurements; repeats: all of them."""

    median: float
    least: float
    most: float
    repeats: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Return the spread of some values; None of none."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), tuple(values))
