"""Clover speculative decoding: draft heads that let a language model emit several tokens a step.

`clover_jax.api` is for notebooks and programs. It is imported when it is asked for, so that
importing this package loads nothing.
"""

import importlib
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name != "api":
        raise AttributeError(f"module 'clover_jax' has no attribute {name!r}")
    return importlib.import_module("clover_jax.api")
