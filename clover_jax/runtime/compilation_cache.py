"""Compiled programs kept on disk, so that a command's second run starts in seconds.

Nothing here imports JAX: it reads these variables when it is imported.
"""

import os
import platform
from collections.abc import MutableMapping
from pathlib import Path


def use_compilation_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX keep compiled programs under the user's cache folder, unless it has a folder set.

    A folder a host: programs for a CPU use the instructions that it has. Where JAX was given a
    folder, nothing is changed; JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment:
        return
    # Of each user, where the system keeps what may be deleted.
    root = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "clover_jax", "programs", platform.node() or "host")
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # Small programs too, since a command compiles hundreds of them; the oldest go beyond 2 GB.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))
