"""Stop strings: where they cut a text that comes token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class StopCut(NamedTuple):
    """Where a stop string ended a text.

    num_kept: tokens whose text ends before it; one that holds its beginning is not among them.
    text: what stands before it.
    """

    num_kept: int
    text: str


class Pieces(Protocol):
    """Turns tokens into text that no later token changes, as `TextStream` does."""

    def push(self, ids: Sequence[int]) -> str:
        """Return what more tokens settle."""

    def held(self) -> str:
        """Return the rest, as it reads if nothing follows."""

    def holds_back(self, ids: Sequence[int]) -> bool:
        """Return whether text of some of these tokens may read otherwise after later ones."""


class StopSearch:
    """Looks for stop strings in one text as its tokens come; it finds what `find_stop` does."""

    def __init__(self, stops: Sequence[str], open_pieces: Callable[[], Pieces]):
        """Begin a text; `open_pieces` gives it from its first token on."""
        self._stops, self._open = stops, open_pieces
        self._pieces = open_pieces() if stops else None
        self._overlap = max(map(len, stops), default=1) - 1  # of two pieces that hold one string
        self._recent = ""
        self._num_clean = 0

    def take(self, ids: Sequence[int]) -> StopCut | None:
        """Return where the text of all tokens so far is cut; None where it is not."""
        if not self._stops:
            return None
        new, pieces = ids[self._num_clean :], self._pieces
        # Token by token where one may undo what those before it read, else all at once.
        for part in [[id_] for id_ in new] if pieces.holds_back(new) else [new]:
            text = self._recent + pieces.push(part)
            if _first(text + pieces.held(), self._stops) is not None:
                return find_stop(self._open, ids, self._stops, self._num_clean)
            self._recent = text[max(len(text) - self._overlap, 0) :]
        self._num_clean = len(ids)
        return None


def find_stop(
    open_pieces: Callable[[], Pieces],
    ids: Sequence[int],
    stops: Sequence[str],
    num_clean: int = 0,
) -> StopCut | None:
    """Return where the first stop string cuts the text of `ids`; None where there is none.

    First is the one that the fewest tokens complete; of several, the leftmost. So the answer does
    not depend on how many tokens come at a time.

    num_clean: of how many tokens it is known that their text, and that of fewer, holds none.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    pieces = open_pieces()
    settled = pieces.push(ids[:num_clean])
    for num_seen in range(num_clean + 1, len(ids) + 1):
        settled += pieces.push(ids[num_seen - 1 : num_seen])
        text = settled + pieces.held()
        position = _first(text, stops)
        if position is not None:
            return StopCut(_num_before(open_pieces, ids[:num_seen], position), text[:position])
    return None


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Return how much of a text no stop string can cut any more, whatever follows.

    Example: for "so\\n" and the stop "\\n\\n" it is 2: another newline would take this one away. So
    it is for "so\\n\\nbe".
    """
    return min((_settled(text, stop) for stop in stops), default=len(text))


def _num_before(open_pieces: Callable[[], Pieces], ids: Sequence[int], position: int) -> int:
    """Return how many tokens have a text that ends at `position` or before."""

    def length(count: int) -> int:
        pieces = open_pieces()
        return len(pieces.push(ids[:count]) + pieces.held())

    # A stop string is short: the cut is near.
    return next((count for count in reversed(range(len(ids))) if length(count) <= position), 0)


def _first(text: str, stops: Sequence[str]) -> int | None:
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(found, default=None)


def _settled(text: str, stop: str) -> int:
    """Return where `stop`, or else the longest end of `text` that may become it, begins."""
    if stop in text:
        return text.index(stop)
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return len(text) - next((n for n in lengths if text.endswith(stop[:n])), 0)
