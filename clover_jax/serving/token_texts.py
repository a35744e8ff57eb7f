"""How single tokens read, for log-probabilities and for `/tokenize`."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover_jax.data.detokenization import BYTE_TOKEN, INCOMPLETE, decode_text, special_ids
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTINUES, _BEGINS = 0x80, 0xC0  # the least bytes of UTF-8 that continue a character, or begin one


class TokenTexts:
    """The texts of one tokenizer's tokens, each made once.

    tokenizer: None where the base has none; tokens then read "token_id:7".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = tokenizer
        # Decoders of the SentencePiece kind drop a space at the start, so tokens follow a letter.
        before = tokenizer("a", add_special_tokens=False)["input_ids"] if tokenizer else []
        self._before = list(before)[-1:]
        self._special = special_ids(tokenizer) if tokenizer else frozenset()
        # One cache for each object: a cache on the class would keep every tokenizer alive.
        self.text = functools.cache(self._text)
        self.spelled = functools.cache(self._spelled)

    def _text(self, id_: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{id_}"
        # Special tokens have no text, but they must be visible where tokens are listed.
        if id_ in self._special:
            return self.written(id_)
        return decode_text(self._tokenizer, [id_], self._before)

    def _spelled(self, id_: int) -> list[int] | None:
        """Return a token's bytes; None where they are not known."""
        text = self.text(id_)
        if self._tokenizer is None:
            return None
        if INCOMPLETE not in text:
            return list(text.encode())
        # A part of a character: its bytes follow from its name.
        name = self.written(id_)
        byte, alphabet = BYTE_TOKEN.fullmatch(name), _byte_alphabet()
        if byte:
            return [int(byte[1], 16)]
        return [alphabet[c] for c in name] if all(c in alphabet for c in name) else None

    def is_text(self, id_: int, shows_special: bool = False) -> bool:
        return self._tokenizer is not None and (shows_special or id_ not in self._special)

    def added(self, id_: int, is_start: bool) -> bytes:
        """Return the bytes that a token adds to a text; is_start: to an empty one."""
        text = self.text(id_)
        if INCOMPLETE in text:
            return bytes(self.spelled(id_) or text.encode())
        return (decode_text(self._known(), [id_], (), self._special) if is_start else text).encode()

    def written(self, id_: int) -> str:
        """Return a token as the vocabulary writes it."""
        return str(self._known().convert_ids_to_tokens(id_))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._known()(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int], shows_special: bool = False) -> str:
        """Return the text of token ids."""
        return decode_text(self._known(), ids, (), self._special if shows_special else frozenset())

    def _known(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise UserError("the base has no tokenizer files; give and take token ids")
        return self._tokenizer


class TokenPlaces:
    """Where each token of one text begins, in characters, as its tokens come.

    is_start: whether the first token begins the text, and does not continue another. Without a
        tokenizer nothing has a text, and all tokens are at 0.
    shows_special: whether special tokens are part of the text.
    """

    def __init__(self, texts: TokenTexts, is_start: bool, shows_special: bool = False):
        self._texts, self._is_start, self._shows_special = texts, is_start, shows_special
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far, but for a character that lacks bytes

    def next(self, id_: int) -> int:
        """Return where the next token begins; parts of a character begin where it does."""
        if not self._texts.is_text(id_, self._shows_special):
            return self._length
        added, self._is_start = self._texts.added(id_, self._is_start), False
        # What does not go on with a character that lacks bytes leaves it a replacement character.
        if added and not _CONTINUES <= added[0] < _BEGINS:
            self._length += len(self._characters.decode(b"", final=True))
        begin = self._length
        self._length += len(self._characters.decode(added))
        return begin


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of vocabularies of bytes, which write each as a character (GPT-2).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = [*printable, *range(256, 256 + len(others))]
    return dict(zip(map(chr, named), [*printable, *others], strict=True))
