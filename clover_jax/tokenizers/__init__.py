"""Tokenizers of bases, loaded without foreign code, and the text of tokens as they come."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "detokenization": ["TextStream", "decode_text"],
        "sentencepiece_tokenizer": ["load_sentencepiece"],
        "tokenizer": ["load_tokenizer", "template_text", "tokenizer_hash"],
    },
)
