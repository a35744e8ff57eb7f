"""The manifest of a report: settings, versions, machine, hashes."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import jax

from clover_jax.decoding.tree_config import portable_name
from clover_jax.evaluation.methods import Method
from clover_jax.loading.identity import identity_of
from clover_jax.runtime.provenance import versions


def manifest(flags: dict[str, Any], methods: list[Method], prompts: dict[str, Any]) -> dict:
    """Return the manifest of a run.

    flags: every flag's value. prompts: their file, hash and count.
    """
    plain = methods[0].models
    identity = identity_of(plain)  # hashes, so that reports of other weights do not compare

    return {
        "command": "evaluate",
        "flags": flags,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(),
        # As loaded: the flag may say auto.
        "dtype": identity["dtype"],
        "base": {
            "source": plain.base.source,
            "hash": identity["base_hash"],
            "params": identity["base_params"],
            "config": identity["base_config"],
            "chat_template": identity["chat_template"],
        },
        "prompts": prompts,
        "drafts": {method.name: _draft(method) for method in methods[1:]},
    }


def conditions(mesh: str | None) -> dict[str, Any]:
    """Return what times depend on beside the models; other conditions are not comparable."""
    return {"hardware": hardware(), "versions": versions(), "mesh": mesh}


def hardware() -> dict[str, Any]:
    """Return the hardware of the run."""
    device = jax.devices()[0]
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def _draft(method: Method) -> dict[str, Any]:
    draft, identity = method.models.draft, identity_of(method.models)
    assert draft is not None  # only the first method is plain decoding
    return {
        "source": draft.source,
        "kind": draft.head.config.kind,
        "hash": identity["draft_hash"],
        "tree": portable_name(method.models.tree),
        "tree_hash": identity["tree_hash"],
        "nodes": method.models.tree.num_nodes,
        # How it was trained, where its folder says so: heads of other projects do not.
        **{key: draft.provenance.get(key) for key in ("steps", "git_revision", "data_hash")},
    }


def _processor() -> str:
    """Return the processor's name where the system has it (Linux)."""
    # JAX calls every CPU "cpu", whatever its speed.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
