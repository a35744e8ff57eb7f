"""Measurements cached on disk; the key is everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from clover_jax.errors import UserError
from clover_jax.loading.models import Models
from clover_jax.runtime.provenance import compiler_versions
from clover_jax.storage.files import atomic_file
from clover_jax.storage.json_files import read_json_object

EDITION = 7  # of what is remembered: raised when steps, or how they are timed, change


def machine(mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
    """Return the part of every key: the device, the mesh and the compilers."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "edition": EDITION,
        "mesh": dict(mesh.shape) if mesh else None,
        # With another compiler another way may be the fastest.
        "versions": compiler_versions(),
    }


def timing_key(models: Models, batch_size: int, context: int) -> dict[str, Any]:
    """Return the key of a step's times on this machine, whatever its tree."""
    return machine(models.mesh) | {
        "base": models.base.config.to_dict(),
        "head": models.head.config.to_dict() if models.head else None,
        "dtype": str(models.dtype),
        "int8": list(models.int8),
        "batch_size": batch_size,
        "context": context,
    }


def remembered(
    name: str, key: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the cached measurement of this key, or measure it now and keep it.

    key: JSON values; everything that changes the result must be in it. An unreadable file is
        measured anew.
    """
    # One folder for each host, beside its compiled programs.
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "clover_jax", "measurements", platform.node() or "host")
    text = json.dumps(key, sort_keys=True)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.is_file():
        try:
            kept = read_json_object(path)
        except UserError:
            kept = {}
        # The name has only a part of the hash, so the key itself is compared, as JSON gives it
        # back: with lists for tuples.
        if kept.get("key") == json.loads(text) and isinstance(kept.get("value"), dict):
            return kept["value"]
    value = measure()
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps({"key": key, "value": value}, indent=1) + "\n")
    return value
