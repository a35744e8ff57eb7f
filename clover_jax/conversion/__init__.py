"""`convert`: a head in another layout, verified by decoding, published with a model card."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "conversion": ["convert"],
        "options": ["ConvertOptions"],
        "verification": ["Verification", "verify"],
    },
)
