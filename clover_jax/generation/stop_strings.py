"""Stop strings: where they cut a text that comes token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    def finish(self) -> str:
        """Return what was held back."""


class StopSearch:
    """Looks for stop strings in one text as its tokens come.

    It finds what `find_stop` finds in the whole text, after at most the tokens that settle it.
    """

    def __init__(self, stops: Sequence[str], open_pieces: Callable[[], Pieces]):
        """Begin a text; `open_pieces` gives it from its first token on."""
        self._stops, self._open = stops, open_pieces
        self._pieces = open_pieces() if stops else None
        self._overlap = max(map(len, stops), default=1) - 1  # of two pieces that hold one string
        self._recent = ""
        self._num_clean = 0

    def take(self, ids: Sequence[int], *, ended: bool) -> StopCut | None:
        """Return where the text of all tokens so far is cut; None where it is not."""
        if not self._stops:
            return None
        text = self._recent + self._pieces.push(ids[self._num_clean :])
        if ended:
            text += self._pieces.finish()
        if _first(text, self._stops) is not None:
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

    First is the one that is settled by the fewest tokens; of several, the leftmost. So the answer
    does not depend on how many tokens come at a time.

    num_clean: how many tokens settle a text without any.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    pieces = open_pieces()
    text = pieces.push(ids[:num_clean])
    for num_seen, piece in enumerate(_one_by_one(pieces, ids[num_clean:]), start=num_clean + 1):
        text += piece
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


def _one_by_one(pieces: Pieces, ids: Sequence[int]) -> Iterator[str]:
    for id_ in ids:
        yield pieces.push([id_])
    yield pieces.finish()


def _num_before(open_pieces: Callable[[], Pieces], ids: Sequence[int], position: int) -> int:
    """Return how many tokens have a text that ends at `position` or before."""

    def length(count: int) -> int:
        pieces = open_pieces()
        return len(pieces.push(ids[:count]) + pieces.finish())

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
