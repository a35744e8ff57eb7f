"""The text of tokens that continue others, whole or piece by piece as they come.

`tokenizers.decoders.DecodeStream` is not exact for byte tokens ("<0x41>", as SentencePiece names
them), where one bad byte turns its whole run into replacement characters. For the tokens <0x22>
<0x89> un of stories260k it returns '"' for the first and raises "Invalid prefix" at the third; the
text is "\\ufffd\\ufffdun". It also drops an incomplete end, and repeats text of a prompt that ends
within a character. So here a run waits until it has ended.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEAR = 32  # tokens before others that may decide the spelling of those
_LONG = 2 * _NEAR  # a longer text is decoded from near its end only
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# A character that lacks bytes reads as this; a later token may complete it.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_OPEN = 3  # bytes of a character that lacks its last
_NONE: frozenset[int] = frozenset()


@functools.lru_cache(maxsize=4)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, which have no text, also those that have no role such as EOS."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids).union(id_ for id_, one in added if one.special)


def decode_text(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: Sequence[int] = (),
    shown: frozenset[int] = _NONE,
) -> str:
    """Return the text of `ids` without special tokens, its spaces as the model wrote them.

    context: tokens that come before, such as a prompt's. Decoders of the SentencePiece kind drop a
        space at the start of a text, which the start of a continuation must keep. A character that
        the context leaves incomplete belongs to the continuation.
    shown: special tokens that are text too.
    """
    # Decoding all of a long context for every piece would take ever longer.
    near = _near_context(tokenizer, context, shown)
    return _decode(tokenizer, [*near, *ids], shown)[_settled_length(tokenizer, near, shown) :]


class TextStream:
    """Turn tokens into text piece by piece.

    All pieces, followed by `held()`, are `decode_text` of all tokens. A character may span tokens,
    so a piece ends before bytes that a later token may complete.

    context: tokens before the first, and shown: special tokens, as for `decode_text`.

    Example, for a tokenizer that spells "é" in two byte tokens 5 and 6:

        stream = TextStream(tokenizer)
        stream.push([5])  # ""
        stream.push([6, 7])  # "é!"
        stream.held()  # ""
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        shown: frozenset[int] = _NONE,
    ):
        self._tokenizer, self._shown = tokenizer, shown
        self._in_run = _run_tokens(tokenizer, shown)
        self._ids = _near_context(tokenizer, context, shown)
        # Characters of the text of `_ids` that were returned or are the context's.
        self._num_emitted = _settled_length(tokenizer, self._ids, shown)
        self._held: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens and return the text that they settle, perhaps "" for now."""
        begin = len(self._ids)
        self._ids.extend(int(id_) for id_ in ids)
        self._held = None
        # A run of byte tokens waits for its end: one bad byte would change all its text.
        end = len(self._ids)
        while end > begin and self._ids[end - 1] in self._in_run:
            end -= 1
        if end == begin:
            return ""

        # The last character may still lack bytes; if none come, `held` returns it as it is.
        text = _decode(self._tokenizer, self._ids[:end], self._shown)
        settled = text.rstrip(INCOMPLETE)
        piece = settled[self._num_emitted :]
        self._num_emitted += len(piece)
        # Without a run at the end the text is whole, and need not be decoded again.
        if end == len(self._ids):
            self._held = text[self._num_emitted :]

        # Drop tokens long before `end` when all their text is out, so that pushes stay short.
        # Decoders look at neighbors, so the last ones stay; the cut must not lie within a run.
        if settled == text and len(self._ids) > _LONG:
            start = max(end - _NEAR, 0)
            while start and self._ids[start] in self._in_run:
                start -= 1
            self._num_emitted = len(_decode(self._tokenizer, self._ids[start:end], self._shown))
            del self._ids[:start]
        return piece

    def held(self) -> str:
        """Return the text that is held back, as it reads if no token follows."""
        if self._held is None:
            text = _decode(self._tokenizer, self._ids, self._shown)
            self._held = text[self._num_emitted :]
        return self._held

    def holds_back(self, ids: Sequence[int]) -> bool:
        """Return whether later tokens may change the text of some of these tokens."""
        return any(id_ in self._in_run for id_ in ids)


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the text that no stop string can cut any more.

    Example: for the stop "\\n\\n" it is 2 in "so\\n", which may go on, and in "so\\n\\nbe".
    """
    settled = len(text)
    for stop in stops:
        # Where the stop string begins, or the longest end of the text that may become one.
        lengths = range(min(len(text), len(stop) - 1), 0, -1)
        open_ends = (len(text) - n for n in lengths if text.endswith(stop[:n]))
        found = text.find(stop)
        settled = min(settled, next(open_ends, settled) if found < 0 else found)
    return settled


@functools.lru_cache(maxsize=4)
def _run_tokens(tokenizer: PreTrainedTokenizerBase, shown: frozenset[int]) -> Mapping[int, bytes]:
    """Return the byte of each token "<0x00>" to "<0xFF>", and b"" for tokens without a text."""
    in_run = dict.fromkeys(special_ids(tokenizer) - shown, b"")
    # Vocabularies of bytes (GPT-2) have no such tokens: their bytes wait as incomplete characters.
    for token, id_ in tokenizer.get_vocab().items():
        if byte := BYTE_TOKEN.fullmatch(token):
            in_run[id_] = bytes.fromhex(byte[1])
    return in_run


def _near_context(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], shown: frozenset[int]
) -> list[int]:
    """Return the tokens of a context that decide how the first tokens after it are spelled.

    Of byte tokens at its end, only the bytes of an incomplete character: with others, one bad byte
    after them would undo the context's own text.
    """
    in_run, start = _run_tokens(tokenizer, shown), len(ids)
    while start and ids[start - 1] in in_run:
        start -= 1
    run = [id_ for id_ in ids[start:] if in_run[id_]]
    # A run that begins the context stays whole: without it the continuation would begin the text
    # and lose its space.
    if start:
        run = run[len(run) - _num_open(b"".join(in_run[id_] for id_ in run)) :]
    return [*ids[max(start - _NEAR, 0) : start], *run]


def _num_open(text: bytes) -> int:
    """Return how many bytes at the end of a text begin a character that is not complete."""
    # A character has at most four bytes, so at most three are open.
    for count in range(min(_MOST_OPEN, len(text)) + 1):
        try:
            text[: len(text) - count].decode()
            return count
        except UnicodeDecodeError:
            continue
    return 0  # no text at all


def _settled_length(
    tokenizer: PreTrainedTokenizerBase, context: Sequence[int], shown: frozenset[int]
) -> int:
    """Return the length of the context's text, without a character that tokens after it end."""
    cuts = range(min(_MOST_OPEN, len(context)) + 1)
    texts = (_decode(tokenizer, context[: len(context) - cut], shown) for cut in cuts)
    # Longest where byte tokens are left out that would make their whole run unreadable.
    return max(len(text.rstrip(INCOMPLETE)) for text in texts)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], shown: frozenset[int]) -> str:
    # The library shows all special tokens or none.
    hidden = special_ids(tokenizer) - shown if shown else _NONE
    text = tokenizer.decode(
        [id_ for id_ in ids if id_ not in hidden],
        skip_special_tokens=not shown,
        clean_up_tokenization_spaces=False,
    )
    # A list of ids gives one text, but the library's annotation allows several.
    return str(text)
