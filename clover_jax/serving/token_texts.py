"""How single tokens read, for log-probabilities and for `/tokenize`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover_jax.errors import UserError
from clover_jax.tokenizers.detokenization import BYTE_TOKEN, INCOMPLETE, TextStream, decode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """The texts of one tokenizer's tokens, each made once.

    tokenizer: None where the base has none; tokens then read "token_id:7".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = tokenizer
        # Decoders of the SentencePiece kind drop a space at the start, so tokens follow a letter.
        before = tokenizer("a", add_special_tokens=False)["input_ids"] if tokenizer else []
        self._before = list(before)[-1:]
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer else frozenset()
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

    def places(self, is_start: bool) -> TokenPlaces:
        """Return what tells where the tokens of a text begin, or of one that continues another."""
        if self._tokenizer is None:
            return TokenPlaces(self, None)
        return TokenPlaces(self, TextStream(self._tokenizer, [] if is_start else self._before))

    def is_whole(self, id_: int) -> bool:
        """Return whether a token's text is what it adds to any text but an empty one."""
        return id_ not in self._special and INCOMPLETE not in self.text(id_)

    def written(self, id_: int) -> str:
        """Return a token as the vocabulary writes it."""
        return str(self._known().convert_ids_to_tokens(id_))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self._known()(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return decode_text(self._known(), ids)

    def _known(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise UserError("the base has no tokenizer files; give and take token ids")
        return self._tokenizer


class TokenPlaces:
    """Where each token of one text begins, in characters, as its tokens come.

    stream: None where there is no tokenizer, hence no text; all tokens are then at 0.
    """

    def __init__(self, texts: TokenTexts, stream: TextStream | None):
        self._texts, self._stream = texts, stream
        self._settled, self._last = 0, 0  # characters, and the last token's place

    def next(self, id_: int) -> int:
        """Return where the next token begins; parts of a character begin where it does."""
        if self._stream is None:
            return 0
        # What is held back may be the beginning of a character that this token goes on with.
        begin = self._settled + len(self._stream.held().rstrip(INCOMPLETE))
        self._settled += len(self._stream.push([id_]))
        # It may have settled what no token completed: that is before it.
        if self._texts.is_whole(id_):
            begin = max(begin, self._settled - len(self._texts.text(id_)))
        self._last = max(self._last, begin)
        return self._last


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of vocabularies of bytes, which write each as a character (GPT-2).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
