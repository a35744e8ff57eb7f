"""Stop strings: where they cut a text that comes token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class StopCut(NamedTuple):
    """Where a stop string ended a text.

    num_kept: tokens whose text ends before it; one that holds its beginning is not among them.
    text: what stands before it.
    """

    num_kept: int
    text: str


def find_stop(
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    stops: Sequence[str],
    num_clean: int = 0,
) -> StopCut | None:
    """Return where the first stop string cuts the text of `ids`; None where there is none.

    First is the one that is complete after the fewest tokens; of several, the leftmost. So the
    answer does not depend on how many tokens come at a time.

    decode: gives the text of the first tokens.
    num_clean: of how many tokens it is known that their text holds none.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    if _first(decode(ids), stops) is None:
        return None
    for num_seen in range(num_clean + 1, len(ids) + 1):
        text = decode(ids[:num_seen])
        position = _first(text, stops)
        if position is not None:
            before = reversed(range(num_seen))  # a stop is short: the cut is near
            kept = next((n for n in before if len(decode(ids[:n])) <= position), 0)
            return StopCut(kept, text[:position])
    return None


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Return how much of a text no stop string can cut any more, whatever follows.

    Example: for "so\\n" and the stop "\\n\\n" it is 2: another newline would take this one away. So
    it is for "so\\n\\nbe".
    """
    return min((_settled(text, stop) for stop in stops), default=len(text))


def _first(text: str, stops: Sequence[str]) -> int | None:
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(found, default=None)


def _settled(text: str, stop: str) -> int:
    """Return where `stop`, or else the longest end of `text` that may become it, begins."""
    if stop in text:
        return text.index(stop)
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return len(text) - next((n for n in lengths if text.endswith(stop[:n])), 0)
