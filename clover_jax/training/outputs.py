"""What a run leaves for others: WORKDIR/draft, the last step, and WORKDIR/best, by tau."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_jax.array_types import Params
from clover_jax.config import DrafterConfig
from clover_jax.drafters.directory import save_draft
from clover_jax.models.fingerprint import BaseFingerprint
from clover_jax.training.provenance import git_revision, versions

DRAFT, BEST = "draft", "best"


class DraftWriter:
    """Writes native draft directories, each replaced atomically."""

    def __init__(
        self,
        workdir: Path,
        config: DrafterConfig,
        tree: str,
        base: BaseFingerprint,
        flags: dict[str, Any],
        data_hash: str,
    ):
        """Take what is the same for every step of a run."""
        self._workdir, self._config, self._tree, self._base = workdir, config, tree, base
        self._provenance = {
            "command": "train",
            "flags": flags,
            "data_hash": data_hash,
            "git_revision": git_revision(),
            "versions": versions(),
        }

    def write(
        self, name: str, params: Params, step: int, measured: dict[str, Any] | None = None
    ) -> Path:
        """Write WORKDIR/name. measured: the row of eval.jsonl of this very step, if any."""
        provenance = self._provenance | {
            "steps": step,
            "tau": measured["tau"] if measured else None,
            "measured": measured,
        }
        directory = self._workdir / name
        save_draft(directory, self._config, params, self._tree, self._base, provenance)
        return directory
