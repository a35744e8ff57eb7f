"""From conversations to prepared folders: previewed, regenerated, tokenised, features cached."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "options": ["PrepareOptions"],
        "run": ["run_prepare"],
    },
)
