"""What a user asks the command for, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from clover_jax.errors import UserError
from clover_jax.loading.subject import NO_DRAFT


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks for, by the names of the command's flags."""

    prompt: str | None
    prompts: str | None
    base: str
    draft: str
    tree: str | None
    dtype: str
    mesh: str | None
    batch_size: int
    seed: int
    output: str | None
    overwrite: bool
    strict: bool
    allow_base_mismatch: bool
    draft_rope_theta: float | None
    calibration: str | None = None
    int8: Sequence[str] = ()
    chat_template: str | None = None

    def __post_init__(self):
        if self.calibration is not None and self.tree != "auto":
            raise UserError(
                f"--calibration={self.calibration} is for --tree=auto; add that, or leave it out"
            )
        if self.tree == "auto" and self.draft == NO_DRAFT:
            raise UserError("--tree=auto chooses a tree for a draft; give --draft=DIR")
        if self.prompt is not None and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        if self.output is not None and _resolved(self.output) in map(_resolved, self._inputs):
            raise UserError(f"--output={self.output} is a file of prompts; give another name")
        if self.overwrite and self.output is None:
            raise UserError("--overwrite is for --output=FILE, which is missing")

    @property
    def _inputs(self) -> list[str]:
        return [path for path in (self.prompts, self.calibration) if path is not None]

    @property
    def begun(self) -> Path | None:
        """The row file that is gone on with, if it is there; None where nothing is."""
        fresh = self.output is None or self.overwrite
        return None if fresh else Path(self.output).expanduser()

    @property
    def is_live(self) -> bool:
        """Whether one row is watched as it comes."""
        return self.prompts is None


def _resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()
