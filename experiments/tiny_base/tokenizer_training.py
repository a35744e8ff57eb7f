"""Train the byte-level BPE tokenizer of a base made here, and write it for `transformers`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from clover_jax.errors import UserError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

# Where merges may not cross, tuned for Python. A line break takes the indentation after it along,
# so that "\n        " can be one token; identifiers keep underscores and one leading character,
# as in ".append" or "(self"; a prompt that ends before its line break is cut as in training.
SPLIT_PATTERN = "|".join(
    (
        r"(?:[ \t]*\r?\n)+[ \t]*",
        r"[^\r\n\p{L}\p{N}]?[\p{L}_]+",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}_]+",
        r"\s+",
    )
)


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a vocabulary without room for the bytes and the special tokens."""
    smallest = 256 + 3
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size ({vocab_size}) must be at least {smallest}: 256 bytes and 3 special tokens"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; BOS, EOS and PAD are ids 0, 1 and 2.

    Any text survives encoding and decoding exactly. Like Llama's, the tokenizer puts BOS first
    unless `add_special_tokens=False`.

    Raises:
      UserError: see `check_vocab_size`.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the int32 token ids of each text, without special tokens."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """Write `tokenizer.json` and the `tokenizer_config.json` that `AutoTokenizer` reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
