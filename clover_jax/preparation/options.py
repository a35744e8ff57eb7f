"""The settings of `prepare`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.errors import UserError
from clover_jax.loading.models import NO_DRAFT, ModelSpec


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """By the names of the command's flags; `output` is the folder."""

    spec: ModelSpec
    seed: int
    data: str
    output: Path
    seq_len: int
    max_truncated: float | None
    preview: bool
    preview_samples: int
    features: str
    feature_dtype: str
    batch_size: int
    yes: bool
    overwrite: bool
    regenerate: bool
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self):
        # A flag that would do nothing is a misunderstanding.
        if self.preview and (self.regenerate or self.features != "none"):
            raise UserError("--preview shows the data as they are; leave out what it would not do")
        given = {"draft": self.spec.draft != NO_DRAFT, "tree": self.spec.tree is not None}
        for name, is_given in given.items():
            if is_given and not self.regenerate:
                raise UserError(f"--{name} is for --regenerate, which is missing")
