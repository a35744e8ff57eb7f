"""A base model's tokenizer: quiet, offline loading, and its identity."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any of these makes a folder one with a tokenizer; a tokenizer_config.json alone holds no words.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Tokenizers that are fully described by their SentencePiece model. Baichuan's classes are code in
# the folder that does no more, and is never run. For configs without a class the type decides.
_PLAIN_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "BaiChuanTokenizer", "BaichuanTokenizer")
_PLAIN_TYPES = ("llama", "mistral", "baichuan")


def load_tokenizer(directory: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """Load a folder's tokenizer offline, None without one; raises UserError for broken files."""
    directory = Path(directory)
    # Without a vocabulary prompts must be token ids.
    found = [name for name in _VOCABULARY_FILES if (directory / name).is_file()]
    if not found:
        return None
    if found == ["tokenizer.model"] and importlib.util.find_spec("sentencepiece") is None:
        raise UserError(
            f"{directory} has tokenizer.model only, which sentencepiece reads: "
            "pip install sentencepiece"
        )
    # Set before transformers is imported, which then does not warn that torch is absent.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # Its warnings are about training and about torch; real problems raise errors.
    transformers.logging.set_verbosity_error()
    try:
        if "tokenizer.json" not in found and "tokenizer.model" in found:
            return _load_sentencepiece(directory)
        # trust_remote_code is explicit: left to its default, transformers asks on the terminal.
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for a bad file
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{directory}: its tokenizer is custom code, which is never run here; save it "
                "once as tokenizer.json with transformers, or pass prompts as prompt_ids"
            ) from error
        reason = " ".join(str(error).split())
        raise UserError(
            f"{directory}: its tokenizer cannot be loaded: {reason}; save it as tokenizer.json "
            "with transformers, or pass prompts as prompt_ids and a folder without tokenizer files"
        ) from error


def _load_sentencepiece(directory: Path) -> PreTrainedTokenizerBase:
    """Load a folder that has a SentencePiece model only: older Llamas, Vicuna, Baichuan.

    The generic class of transformers follows the settings in the model file, so ids equal
    SentencePiece's. Its class for Llama drops the prefix of a text that starts with a space.
    """
    import transformers

    def optional_json(name: str) -> dict[str, Any]:
        path = directory / name
        return read_json_object(path) if path.is_file() else {}

    settings = optional_json("tokenizer_config.json")
    name = settings.get("tokenizer_class")
    is_plain = optional_json("config.json").get("model_type") in _PLAIN_TYPES
    if not (name in _PLAIN_CLASSES if name else is_plain):
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    # transformers would take a broken file for another format.
    from sentencepiece import SentencePieceProcessor

    SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    # Llama's default: BOS at the start of a text.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        str(directory), local_files_only=True, add_bos_token=settings.get("add_bos_token", True)
    )

    # transformers skips added_tokens.json next to the newer field. A token gets the next free id.
    added = dict(optional_json("added_tokens.json"))
    decoder = settings.get("added_tokens_decoder") or {}
    added |= {fields["content"]: int(id_) for id_, fields in decoder.items()}
    for text, id_ in sorted(added.items(), key=lambda item: item[1]):
        if text not in tokenizer.get_vocab():
            tokenizer.add_tokens([transformers.AddedToken(text, normalized=False)])
        if (actual := tokenizer.get_vocab().get(text)) != id_:
            raise UserError(
                f"{directory}: its added token {text!r} should have id {id_}, but gets {actual}; "
                "added tokens must follow the pieces of tokenizer.model without a gap"
            )
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokens and their ids, added ones included; no setting changes it."""
    # In the order of the ids: dictionaries keep the order in which a library filled them.
    pairs = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def template_text(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the text of the chat template; None without one."""
    template = tokenizer.chat_template if tokenizer is not None else None
    return str(template) if template else None


def template_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return SHA-256 of the chat template's text; None without one."""
    text = template_text(tokenizer)
    return hashlib.sha256(text.encode()).hexdigest() if text else None
