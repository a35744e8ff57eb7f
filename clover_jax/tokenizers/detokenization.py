"""The text of tokens that continue others, whole or piece by piece as they come."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEAR = 32  # tokens before others that may decide the spelling of those
_LONG = 2 * _NEAR  # tokens to decode at once, of a text that streams
# A token of a single byte, as SentencePiece names it.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# A character that lacks bytes reads as this; a later token may complete it.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_OPEN = 3  # bytes of a character that lacks its last


def decode_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], context: Sequence[int] = ()
) -> str:
    """Return the text of `ids` without special tokens, its spaces as the model wrote them.

    context: tokens that come before, such as a prompt's. Decoders of the SentencePiece kind drop a
        space at the start of a text, which the start of a continuation must keep. A character that
        the context leaves incomplete belongs to what follows.
    """
    # Decoding all of a long context for every piece would take ever longer.
    near = _near_context(tokenizer, context)
    return _decode(tokenizer, [*near, *ids])[_settled_length(tokenizer, near) :]


class TextStream:
    """Turn tokens into text piece by piece.

    The pieces joined, and what is held back in the end, are `decode_text` of all tokens.

    context: tokens before the first, as for `decode_text`.

    One character may span tokens, so a piece ends before bytes that a later token may complete.

    Example, for a tokenizer that spells "é" in two byte tokens 5 and 6:

        stream = TextStream(tokenizer)
        stream.push([5])  # ""
        stream.push([6, 7])  # "é!"
        stream.held()  # ""
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._in_run = _run_tokens(tokenizer)
        self._ids = _near_context(tokenizer, context)
        # Characters of the text of `_ids` that were returned or are the context's.
        self._num_emitted = _settled_length(tokenizer, self._ids)
        self._held: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Take in more tokens and return the text that they settle, perhaps "" for now."""
        self._ids.extend(int(id_) for id_ in ids)
        # A run of byte tokens waits for its end: one bad byte would change all its text.
        end = len(self._ids)
        while end and self._ids[end - 1] in self._in_run:
            end -= 1
        text = _decode(self._tokenizer, self._ids[:end])
        # The last character may still lack bytes; where none come, `held` gives it as it is.
        settled = text.rstrip(INCOMPLETE)
        piece = settled[self._num_emitted :]
        self._num_emitted += len(piece)

        # Without a run at the end the text is whole, and need not be decoded again.
        self._held = text[self._num_emitted :] if end == len(self._ids) else None
        if settled == text and len(self._ids) > _LONG:
            self._forget(end)
        return piece

    def held(self) -> str:
        """Return what is held back, as it reads if nothing follows.

        Bytes that nothing completed are replacement characters then.
        """
        if self._held is None:
            self._held = _decode(self._tokenizer, self._ids)[self._num_emitted :]
        return self._held

    def holds_back(self, ids: Sequence[int]) -> bool:
        """Return whether text of some of these tokens may read otherwise after later ones."""
        return any(id_ in self._in_run for id_ in ids)

    def _forget(self, end: int) -> None:
        """Let go of tokens far before `end`, up to which all text is out.

        Decoders look at neighbours, so some are decoded again at every push: few, or a push would
        take longer the longer the text is.
        """
        # A run is decoded as a whole, so the cut must not lie within one.
        start = max(end - _NEAR, 0)
        while start and self._ids[start] in self._in_run:
            start -= 1
        self._num_emitted = len(_decode(self._tokenizer, self._ids[start:end]))
        del self._ids[:start]


@functools.lru_cache(maxsize=4)
def _run_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, bytes]:
    """Return the byte of each token "<0x00>" to "<0xFF>" (SentencePiece), none of a special one.

    One bad byte turns its whole run of byte tokens into replacement characters, so nothing of a run
    is settled before it has ended; a special token has no text and does not end it.
    """
    in_run = dict.fromkeys(tokenizer.all_special_ids, b"")
    # Vocabularies of bytes (GPT-2) have no such tokens: their bytes wait as incomplete characters.
    for token, id_ in tokenizer.get_vocab().items():
        byte = BYTE_TOKEN.fullmatch(token)
        if byte:
            in_run[id_] = bytes.fromhex(byte[1])
    return in_run


def _near_context(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Return the tokens of a context that decide how the first ones after it are spelt.

    Of byte tokens at its end only those of an incomplete character: with the others, one bad byte
    after them would undo the context's own text.
    """
    in_run, start = _run_tokens(tokenizer), len(ids)
    while start and ids[start - 1] in in_run:
        start -= 1
    run = [id_ for id_ in ids[start:] if in_run[id_]]
    # A run that begins the context stays: without it what follows would begin the text, and lose
    # its space.
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


def _settled_length(tokenizer: PreTrainedTokenizerBase, context: Sequence[int]) -> int:
    """Return how much of a text is its context's; a character cut in two is not."""
    cuts = range(min(_MOST_OPEN, len(context)) + 1)
    texts = (_decode(tokenizer, context[: len(context) - cut]) for cut in cuts)
    # Longest where byte tokens are left out that would make their whole run unreadable.
    return max(len(text.rstrip(INCOMPLETE)) for text in texts)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    # A list of ids gives one text, but the library's annotation allows several.
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)
