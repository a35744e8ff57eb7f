"""Base models in others' formats: found, read, checked, identified by a fingerprint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["BaseModel"],
        "families": ["ARCHITECTURES", "read_base_config"],
        "family": ["Family"],
        "fingerprint": ["BaseFingerprint", "checksum"],
        "loading": ["describe_base", "load_base", "open_base"],
        "shapes": ["SHAPES", "base_shapes", "is_shape", "shape_config"],
        "sources": ["find_directory"],
        "tensor_files": ["TensorFiles"],
        "tensor_map": ["Leaf", "Piece"],
    },
)
