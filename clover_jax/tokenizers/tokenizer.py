"""A base model's tokenizer: loading it quietly and offline, and its identity."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from clover_jax.errors import UserError
from clover_jax.tokenizers.sentencepiece_tokenizer import (
    is_sentencepiece_folder,
    load_sentencepiece,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any of these makes a folder one with a tokenizer; a tokenizer_config.json alone holds no words.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: str | os.PathLike) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a Hugging Face folder without the network; None where it has none.

    Raises UserError for tokenizer files that cannot be read, with the reason.
    """
    directory = Path(directory)
    # Without a vocabulary prompts must be token ids.
    if not any((directory / name).exists() for name in _VOCABULARY_FILES):
        return None
    # Read when transformers is imported: says that torch is absent, which is intended.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # Its warnings are about training and about torch; what matters here is raised.
    transformers.logging.set_verbosity_error()
    try:
        if is_sentencepiece_folder(directory):
            return load_sentencepiece(directory)
        # Said outright: left to its default, transformers asks on the terminal.
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    # Errors of our own reader need no more words.
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
    """Return a hash of the tokens and their ids, added tokens included.

    It depends on no library version and on no setting that leaves the ids alone. The chat template
    has a hash of its own.
    """
    # In the order of the ids: dictionaries keep the order in which a library filled them.
    pairs = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def template_text(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return the text of the chat template; None without one."""
    template = tokenizer.chat_template if tokenizer is not None else None
    return str(template) if template else None


def template_hash(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return SHA-256 of the chat template's text; None without one."""
    text = template_text(tokenizer)
    return hashlib.sha256(text.encode()).hexdigest() if text else None
