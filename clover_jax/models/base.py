"""The base model as the program passes it around: its config, its params, where it came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A loaded base.

    config: its shapes.
    params: the tree of `models.decoder.Decoder`.
    directory: the folder that holds its config, weights and tokenizer.
    source: what the user asked for: a folder, a hub id, "builtin:NAME", or "shape:NAME", whose
        weights are random.
    """

    config: BaseConfig
    params: Params = dataclasses.field(repr=False)
    directory: Path
    source: str

    @property
    def lm_head(self) -> Array:
        """The [V, D] output matrix, which is the embedding when they are tied."""
        return self.params.get("lm_head", self.params["embedding"])
