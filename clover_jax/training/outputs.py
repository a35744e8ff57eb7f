"""What a run leaves for others: WORKDIR/draft, the last step, and WORKDIR/best, by tau."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_jax.array_types import Params
from clover_jax.decoding.tree import portable_name
from clover_jax.errors import UserError
from clover_jax.interchange.directory import save_draft
from clover_jax.runtime.distributed import is_primary, to_host
from clover_jax.runtime.provenance import git_revision, versions
from clover_jax.storage.checkpoint import disk_reason
from clover_jax.tokenizers.tokenizer import template_text
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import Parts

DRAFT, BEST = "draft", "best"


class DraftWriter:
    """Writes native draft directories, each replaced atomically."""

    def __init__(self, workdir: Path, settings: TrainSettings, parts: Parts):
        """Take what is the same for every step of a run."""
        self._workdir, self._parts = workdir, parts
        self._provenance = {
            "command": "train",
            "flags": settings.to_dict(),
            "data_hash": parts.data.hash,
            "draft_vocab_coverage": parts.draft_vocab_coverage,
            "git_revision": git_revision(),
            "versions": versions(),
        }

    def write(
        self, name: str, params: Params, step: int, measured: dict[str, Any] | None = None
    ) -> Path:
        """Write WORKDIR/name and return it.

        measured: the row of eval.jsonl of this very step, if any.
        Raises UserError where the disk refuses it; what was there before stays.
        """
        provenance = self._provenance | {
            "steps": step,
            "tau": measured["tau"] if measured else None,
            "measured": measured,
        }
        directory = self._workdir / name
        params = to_host(params)
        if not is_primary():
            return directory
        try:
            save_draft(
                directory,
                self._parts.head.config,
                params,
                portable_name(self._parts.tree),
                self._parts.base_fingerprint,
                provenance,
                template_text(self._parts.tokenizer),
            )
        except Exception as error:
            reason = disk_reason(error)
            if reason is None:
                raise
            raise UserError(
                f"cannot write {directory}: {reason}; free some space, the same command then goes "
                "on from the last checkpoint"
            ) from error
        return directory
