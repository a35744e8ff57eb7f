"""Two small tokenizers for tests, of the two kinds that Llama models use."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_byte_level(folder: Path, chat_template: str | None = None) -> Path:
    """Save a byte-level BPE (as in Llama 3): id 0 and 1 are <s> and </s>, then the 256 bytes."""
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt", "Ġthe"]
    vocabulary = {symbol: id_ for id_, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("Ġ", "t"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, chat_template)


def save_byte_fallback(folder: Path) -> Path:
    """Save a SentencePiece-like BPE (as in Llama 2): characters, and <0xNN> for unknown ones."""
    symbols = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    symbols += ["▁", *"abcdehot", "he", "▁t", "▁the"]
    vocabulary = {symbol: id_ for id_, symbol in enumerate(symbols)}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _save(tokenizer, folder, None)


def _save(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    fast.save_pretrained(folder)
    return folder
