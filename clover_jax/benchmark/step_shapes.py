"""A training step without arrays: its static part and the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.data.batch import Batch
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import with_draft_rows
from clover_jax.drafters.registry import DraftHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.families import read_base_config
from clover_jax.pretrained.shapes import base_shapes, is_shape, shape_config
from clover_jax.pretrained.sources import find_directory
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import make_head, optimizer_config, pipeline_config
from clover_jax.training.step import TrainState, TrainStepConfig, init_state
from clover_jax.training.teacher import stored_names


class StepShapes(NamedTuple):
    """What `train_step` takes, as ShapeDtypeStructs."""

    config: TrainStepConfig
    state: TrainState
    base: Params
    batch: Batch

    def trips(self, row_shards: int = 1) -> int:
        """Return the chunks of a part's loss where every position has a target, at most.

        row_shards: devices that share the rows, each with chunks of its own.
        """
        rows, size = self.batch.tokens.shape
        targets = rows * size // (self.config.accumulation_steps * row_shards)
        return math.ceil(targets / min(self.config.loss_chunk, targets))


def step_shapes(settings: TrainSettings, dtype: jnp.dtype) -> StepShapes:
    """Return the step of a run with these settings on one device; nothing is read but a config.

    Raises UserError for settings that cannot work.
    """
    base = _described_base(settings.base)
    head = make_head(settings, base)
    pipeline_config(settings, base, head)  # raises for rows that cannot be
    if settings.draft_vocab is not None:  # which tokens they are changes no shape
        ids = tuple(range(min(settings.draft_vocab, base.config.vocab_size)))
        head = registry.head(dataclasses.replace(head.config, draft_to_target=ids))
    config = TrainStepConfig(
        base.config,
        head,
        optimizer_config(settings),
        settings.loss_chunk,
        accumulation_steps=settings.gradient_accumulation_steps,
        remat=settings.remat,
    )
    params = base_shapes(base.config, dtype)
    return StepShapes(
        config=config,
        state=jax.eval_shape(lambda base: init_state(config, base, settings.seed), params),
        base=jax.eval_shape(lambda base: with_draft_rows(base, head.config), params),
        batch=_batch_shapes(settings, head, dtype),
    )


def _described_base(source: str) -> BaseModel:
    """Return a base without params: its config is all that shapes need."""
    if is_shape(source):
        return BaseModel(shape_config(source), {}, Path(source), source)
    directory = find_directory(source)
    return BaseModel(read_base_config(directory), {}, directory, source)


def _batch_shapes(settings: TrainSettings, head: DraftHead, dtype: jnp.dtype) -> Batch:
    shape = settings.batch_size, settings.seq_len
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    hidden = None
    if settings.teacher == "cached":
        states = jax.ShapeDtypeStruct((*shape, head.config.layer.hidden_size), dtype)
        hidden = dict.fromkeys(stored_names(head.config.features), states)
    return Batch(ids, ids, ids, jax.ShapeDtypeStruct(shape, bool), hidden)
