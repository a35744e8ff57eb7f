"""The versions that a measurement depends on."""

from __future__ import annotations

import importlib.metadata
import platform

_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def versions(target: str | None = None) -> dict[str, str]:
    """Return package -> version: JAX, and the compiler of a target where it is not this machine."""
    names = ("jax", "jaxlib", "flax", *_COMPILERS.get(target or "", ()))
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
