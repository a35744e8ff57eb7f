"""The network of a base: attention over a committed cache, decoder layers, int8 matrices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attention": ["attend"],
        "batch": ["Batch"],
        "cache": ["KeyValue", "init_cache"],
        "decoder": ["Decoder", "DecoderLayer", "project"],
        "int8": ["Int8Matrix", "quantize"],
    },
)
