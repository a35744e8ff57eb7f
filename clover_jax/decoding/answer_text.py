"""The text of an answer while its tokens arrive, and the stop string that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from clover_jax.data.detokenization import INCOMPLETE, TextStream


class StopCut(NamedTuple):
    """Where a stop string ends a text.

    num_kept: tokens whose text ends before the stop string; a token that contains its beginning
        does not. text: the text before it.
    """

    num_kept: int
    text: str


class AnswerText:
    """The text of one answer, detokenized while its tokens arrive.

    `take` finds stop strings as `find_stop` does; `settled` returns the new text.
    """

    def __init__(self, stops: Sequence[str], open_pieces: Callable[[], TextStream]):
        """Begin a text; `open_pieces` returns a stream that starts at its first token."""
        self._stops, self._open = stops, open_pieces
        self._pieces = open_pieces()
        # A stop string may begin in one piece and end in the next.
        self._overlap = max(map(len, stops), default=1) - 1
        self._text = ""
        # Tokens without a stop string in their text, and characters that `rest` has returned.
        self._num_tokens = self._num_handed_out = 0

    def take(self, ids: Sequence[int]) -> StopCut | None:
        """Take in all tokens so far; return where a stop string ends their text, if one does."""
        new = ids[self._num_tokens :]
        # Token by token if a later one may change the text of earlier ones, else all at once.
        is_fragile = self._stops and self._pieces.holds_back(new)
        for part in [[id_] for id_ in new] if is_fragile else [new]:
            # Only the end can contain a new stop string.
            recent = max(len(self._text) - self._overlap, 0)
            self._text += self._pieces.push(part)
            text = _readable(self._text[recent:], self._pieces) if self._stops else ""
            if _first(text, self._stops) is not None:
                # The token that completes it decides the cut.
                return find_stop(self._open, ids, self._stops, self._num_tokens)
        self._num_tokens = len(ids)
        return None

    def settled(self) -> str:
        """Return the new text that neither later tokens nor stop strings can change."""
        return self.rest(self._text[: settled_length(self._text, self._stops)])

    @property
    def is_settled(self) -> bool:
        """Whether no later stop string can begin in the text so far."""
        if not self._stops:
            return True
        return self._num_handed_out == len(self._text) and not self._pieces.held()

    def rest(self, text: str) -> str:
        """Return the part of this text, which a stop string may have cut, that is new."""
        piece = text[self._num_handed_out :]
        self._num_handed_out += len(piece)
        return piece

    def whole(self) -> str:
        """Return the text of all tokens, if no more follow."""
        return self._text + self._pieces.held()


def find_stop(
    open_pieces: Callable[[], TextStream],
    ids: Sequence[int],
    stops: Sequence[str],
    num_clean: int = 0,
) -> StopCut | None:
    """Return where the first stop string ends the text of `ids`, if there is one.

    The first is the one that the fewest tokens complete, and of several the leftmost, so the result
    does not depend on how many tokens arrive at a time. A replacement character at the end counts
    only with the token after it: it may be the beginning of another character.

    num_clean: this many first tokens are known to contain no stop string.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    pieces = open_pieces()
    # Clean tokens at once, then one at a time to find the first that completes a stop string.
    settled = pieces.push(ids[:num_clean])
    for num_seen in range(num_clean + 1, len(ids) + 1):
        settled += pieces.push(ids[num_seen - 1 : num_seen])
        text = _readable(settled, pieces)
        start = _first(text, stops)
        if start is not None:
            return StopCut(_num_before(open_pieces, ids[:num_seen], start), text[:start])
    return None


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the text that no stop string can cut any more.

    Example: for "so\\n" and the stop "\\n\\n" it is 2, since another newline would complete it.
    It is 2 for "so\\n\\nbe" too.
    """
    settled = len(text)
    for stop in stops:
        # Where the stop string begins, or the longest end of the text that may become one.
        lengths = range(min(len(text), len(stop) - 1), 0, -1)
        open_ends = (len(text) - n for n in lengths if text.endswith(stop[:n]))
        found = text.find(stop)
        settled = min(settled, next(open_ends, settled) if found < 0 else found)
    return settled


def _readable(settled: str, pieces: TextStream) -> str:
    """Return a text with its held-back end, except for a character that may lack bytes."""
    return settled + pieces.held().rstrip(INCOMPLETE)


def _num_before(open_pieces: Callable[[], TextStream], ids: Sequence[int], position: int) -> int:
    """Return how many tokens have a text that ends at `position` or before."""

    def length(count: int) -> int:
        # From the start each time, since fewer tokens may change a held-back character.
        pieces = open_pieces()
        return len(pieces.push(ids[:count]) + pieces.held())

    # A stop string is short: the cut is near.
    return next((count for count in reversed(range(len(ids))) if length(count) <= position), 0)


def _first(text: str, stops: Sequence[str]) -> int | None:
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return min(starts, default=None)
