"""A loaded base model: its config, its params, where it came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.models.int8 import Matrix


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A loaded base.

    config: its shapes.
    params: the tree of `models.decoder.Decoder`; empty where only the config was read.
    directory: the folder that holds its config, weights and tokenizer.
    source: the name that the user passed: a folder, a hub id, "builtin:NAME", or "shape:NAME",
        whose weights are random.
    lm_head_hash: of the output matrix before it was quantized; None where it was not.
    """

    config: BaseConfig
    params: Params = dataclasses.field(repr=False)
    directory: Path
    source: str
    lm_head_hash: str | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The type of params that are not quantized, and of activations."""
        # The embedding is never quantized.
        return self.params["embedding"].dtype

    @property
    def lm_head(self) -> Matrix:
        """The [V, D] output matrix, which is the embedding when they are tied."""
        # A tied base gets an lm_head in addition to its embedding when it is quantized.
        return self.params.get("lm_head", self.params["embedding"])
