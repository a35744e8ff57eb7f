"""What a user asks the command for, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.decoding.tree import AUTO
from clover_jax.errors import UserError
from clover_jax.loading.models import NO_DRAFT, ModelSpec


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks for, by the names of the command's flags."""

    spec: ModelSpec
    prompt: str | None
    prompts: str | None
    batch_size: int
    seed: int
    output: str | None
    overwrite: bool
    strict: bool
    calibration: str | None = None

    def __post_init__(self):
        if self.calibration is not None and not self.searches_tree:
            raise UserError(
                f"--calibration={self.calibration} is for --tree=auto; add that, or leave it out"
            )
        if self.searches_tree and self.spec.draft == NO_DRAFT:
            raise UserError("--tree=auto chooses a tree for a draft; give --draft=DIR")
        if self.prompt is not None and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        if self.output is not None and _resolved(self.output) in map(_resolved, self._inputs):
            raise UserError(f"--output={self.output} is a file of prompts; give another name")
        if self.overwrite and self.output is None:
            raise UserError("--overwrite is for --output=FILE, which is missing")

    @property
    def searches_tree(self) -> bool:
        """Whether the tree is found by measurement."""
        return self.spec.tree == AUTO

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
