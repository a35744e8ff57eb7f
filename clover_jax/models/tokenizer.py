"""A base model's tokenizer: loading it quietly and offline, its identity, text that streams."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clover_jax.errors import UserError
from clover_jax.models.sentencepiece_tokenizer import is_sentencepiece_folder, load_sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any of these makes a folder one with a tokenizer; a tokenizer_config.json alone holds no words.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(directory: str | os.PathLike) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a Hugging Face folder without the network; None where it has none.

    Raises:
      UserError: for tokenizer files that cannot be read, with the reason.
    """
    directory = Path(directory)
    if not any((directory / name).exists() for name in _VOCABULARY_FILES):
        return None
    # Read when transformers is imported: says that torch is absent, which is intended.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        if is_sentencepiece_folder(directory):
            return load_sentencepiece(directory)
        # Said outright: left to its default, transformers asks on the terminal.
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for a bad file
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{directory}: its tokenizer is code of its own, which is never run here; save it "
                "once as tokenizer.json with transformers, or give prompts as prompt_ids"
            ) from error
        reason = " ".join(str(error).split())
        raise UserError(
            f"{directory}: its tokenizer cannot be loaded: {reason}; save it as tokenizer.json "
            "with transformers, or give prompts as prompt_ids and a folder without tokenizer files"
        ) from error


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of which token has which id, added tokens included.

    It depends on no library version and on no setting that leaves the ids alone. The chat template
    has a hash of its own.
    """
    pairs = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def template_text(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return what the chat template says; None without one."""
    template = tokenizer.chat_template if tokenizer is not None else None
    return str(template) if template else None


def decode_text(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], context: Sequence[int] = ()
) -> str:
    """Return the text of `ids` without special tokens, its spaces as the model wrote them.

    context: tokens that come before, such as a prompt's. Decoders of the SentencePiece kind drop a
        space at the start of a text, which the start of a continuation must keep.
    """
    return _decode(tokenizer, [*context, *ids])[_settled_length(tokenizer, context) :]


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _settled_length(tokenizer: "PreTrainedTokenizerBase", context: Sequence[int]) -> int:
    """Return how much of a text is its context's; a character cut in two is not."""
    return len(_decode(tokenizer, context).rstrip(_INCOMPLETE)) if context else 0


class TextStream:
    """Turn tokens into text piece by piece; the pieces joined are `decode_text` of all tokens.

    context: tokens before the first, as for `decode_text`.

    One character may span tokens, so a piece ends before bytes that a later token may complete.

    Example, for a tokenizer that spells "é" in two byte tokens 5 and 6:

        stream = TextStream(tokenizer)
        stream.push([5])  # ""
        stream.push([6, 7])  # "é!"
        stream.finish()  # ""
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # "<0x00>" to "<0xFF>" (SentencePiece): one bad byte turns its whole run of byte tokens into
        # replacement characters, so such a run is held back until it has ended.
        self._in_run = set(tokenizer.all_special_ids) | {
            id_ for token, id_ in tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)
        }
        self._ids: list[int] = list(context)
        self._num_emitted = _settled_length(tokenizer, self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """Take in more tokens and return the text that they settle, perhaps "" for now."""
        self._ids.extend(int(id_) for id_ in ids)
        end = len(self._ids)
        while end and self._ids[end - 1] in self._in_run:
            end -= 1
        # Everything is decoded anew, since decoders look at neighbours (spaces, bytes): half a
        # millisecond for a thousand tokens.
        return self._emit(_decode(self._tokenizer, self._ids[:end]).rstrip(_INCOMPLETE))

    def finish(self) -> str:
        """Return what was held back; bytes that nothing completed become replacement characters."""
        return self._emit(_decode(self._tokenizer, self._ids))

    def _emit(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted += len(piece)
        return piece
