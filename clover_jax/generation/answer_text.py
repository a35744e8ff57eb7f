"""The text of an answer as its tokens come, and the stop string that cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from clover_jax.tokenizers.detokenization import INCOMPLETE, TextStream


class StopCut(NamedTuple):
    """Where a stop string ended a text.

    num_kept: tokens whose text ends before it; one that holds its beginning is not among them.
    text: what stands before it.
    """

    num_kept: int
    text: str


class AnswerText:
    """The text of one answer, detokenized once as its tokens come.

    `take` looks for stop strings as `find_stop` does; `settled` returns the new text.
    """

    def __init__(self, stops: Sequence[str], open_pieces: Callable[[], TextStream]):
        """Begin a text; `open_pieces` gives it from its first token on."""
        self._stops, self._open = stops, open_pieces
        self._pieces = open_pieces()
        # A stop string may begin in one piece and end in the next.
        self._overlap = max(map(len, stops), default=1) - 1
        self._text = ""
        # Tokens whose text holds no stop string, and characters that `rest` has returned.
        self._num_tokens = self._num_handed_out = 0

    def take(self, ids: Sequence[int]) -> StopCut | None:
        """Take in all tokens so far; return where a stop string cuts their text, None without."""
        new = ids[self._num_tokens :]
        # Token by token where one may undo what those before it read, else all at once.
        is_fragile = self._stops and self._pieces.holds_back(new)
        for part in [[id_] for id_ in new] if is_fragile else [new]:
            # Only the end may hold a new stop string; to search all text would take ever longer.
            recent = max(len(self._text) - self._overlap, 0)
            self._text += self._pieces.push(part)
            text = _readable(self._text[recent:], self._pieces) if self._stops else ""
            if _first(text, self._stops) is not None:
                # Found somewhere in this part: which token completes it decides the cut.
                return find_stop(self._open, ids, self._stops, self._num_tokens)
        self._num_tokens = len(ids)
        return None

    def settled(self) -> str:
        """Return new text that neither later tokens nor stop strings can change."""
        return self.rest(self._text[: settled_length(self._text, self._stops)])

    @property
    def is_settled(self) -> bool:
        """Whether no stop string that later tokens complete can begin in the text so far."""
        if not self._stops:
            return True
        return self._num_handed_out == len(self._text) and not self._pieces.held()

    def rest(self, text: str) -> str:
        """Return what was not returned yet of this text, which a stop string may have cut."""
        piece = text[self._num_handed_out :]
        self._num_handed_out += len(piece)
        return piece

    def whole(self) -> str:
        """Return the text of all tokens, as it reads when nothing follows."""
        return self._text + self._pieces.held()


def find_stop(
    open_pieces: Callable[[], TextStream],
    ids: Sequence[int],
    stops: Sequence[str],
    num_clean: int = 0,
) -> StopCut | None:
    """Return where the first stop string cuts the text of `ids`; None where there is none.

    First is the one that the fewest tokens complete; of several, the leftmost. So the answer does
    not depend on how many tokens come at a time. A replacement character at the end does not count
    before the token after it: it may be the beginning of another character.

    num_clean: the text of this many tokens, and of fewer, is known to hold none.

    Example: with one letter a token, "a-b--c" and the stop "--" give StopCut(3, "a-b").
    """
    pieces = open_pieces()
    # Clean tokens at once, then one at a time, so that the first that completes a stop is seen.
    settled = pieces.push(ids[:num_clean])
    for num_seen in range(num_clean + 1, len(ids) + 1):
        settled += pieces.push(ids[num_seen - 1 : num_seen])
        text = _readable(settled, pieces)
        start = _first(text, stops)
        if start is not None:
            return StopCut(_num_before(open_pieces, ids[:num_seen], start), text[:start])
    return None


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of a text that no stop string can cut any more.

    Example: for "so\\n" and the stop "\\n\\n" it is 2: another newline would take this one away. So
    it is for "so\\n\\nbe".
    """
    return min((_settled(text, stop) for stop in stops), default=len(text))


def _readable(settled: str, pieces: TextStream) -> str:
    """Return a text with what is held back of it, but for a character that may lack bytes."""
    return settled + pieces.held().rstrip(INCOMPLETE)


def _num_before(open_pieces: Callable[[], TextStream], ids: Sequence[int], position: int) -> int:
    """Return how many tokens have a text that ends at `position` or before."""

    def length(count: int) -> int:
        # From the start each time: a held character reads otherwise with fewer tokens.
        pieces = open_pieces()
        return len(pieces.push(ids[:count]) + pieces.held())

    # A stop string is short: the cut is near.
    return next((count for count in reversed(range(len(ids))) if length(count) <= position), 0)


def _first(text: str, stops: Sequence[str]) -> int | None:
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return min(starts, default=None)


def _settled(text: str, stop: str) -> int:
    """Return where `stop`, or else the longest end of `text` that may become it, begins."""
    if stop in text:
        return text.index(stop)
    # The longest end wins: every shorter one lies within it.
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return len(text) - next((n for n in lengths if text.endswith(stop[:n])), 0)
