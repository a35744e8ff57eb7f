"""Base, head and tree together, the input of an engine, loaded or as shapes alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"models": ["Models", "load", "load_shapes"], "spec": ["ModelSpec"]},
)
