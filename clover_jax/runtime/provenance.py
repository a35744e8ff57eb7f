"""Provenance of a draft or a measurement: versions, and the revision of this program."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import clover_jax

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def versions() -> dict[str, str]:
    """Return the versions of this program, Python and the libraries that matter."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"clover_jax": clover_jax.__version__, "python": platform.python_version(), **libraries}


def compiler_versions(target: str | None = None) -> dict[str, str]:
    """Return package -> version of all that compiles a step.

    target: "tpu" or "cuda", whose compiler counts too; None for this machine's.
    """
    installed = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", *_COMPILERS.get(target or "", ())):
        # Of the two plugins for CUDA one is installed at most.
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_revision() -> str | None:
    """Return the revision of the checkout this runs from, "+" when changed; None outside of one.

    An installed copy in the checkout of another project (in its .venv) is outside of one.
    """
    # Asked of this very file, since a folder further up may be another project's checkout.
    folder = Path(clover_jax.__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        revision = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
