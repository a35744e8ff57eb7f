"""A training step without arrays: its static part and the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import with_draft_rows
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.batch import Batch
from clover_jax.pretrained.loading import describe_base
from clover_jax.pretrained.shapes import base_shapes
from clover_jax.sharding.meshes import MeshShape
from clover_jax.training.heads import make_head
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import pipeline_config, step_config
from clover_jax.training.step import TrainState, TrainStepConfig, init_state
from clover_jax.training.teacher import stored_names

FLOAT32 = 4  # bytes


class StepShapes(NamedTuple):
    """The arguments of `train_step`, as ShapeDtypeStructs."""

    config: TrainStepConfig
    state: TrainState
    base: Params
    batch: Batch

    def trips(self, row_shards: int = 1) -> int:
        """Return the chunks of the loss, of one part of a batch, where all positions are targets.

        row_shards: devices that share the rows, each with chunks of its own.
        """
        rows, size = self.batch.tokens.shape
        targets = rows * size // (self.config.accumulation_steps * row_shards)
        return math.ceil(targets / min(self.config.loss_chunk, targets))

    def activation_bytes(self, mesh: MeshShape) -> int:
        """Estimate the bytes of a device's activations at their largest.

        For an 8B base a dry run gave 1 to 1.3 times the total of the compilers for TPU. The one for
        CPU took 1.5 times these activations for Clover-2 (1.76 GB, snakes5m, 16 x 512), 1.6 times
        on builtin:tiny (8 x 512), 0.9 times for Medusa (snakes5m).
        """
        config, layer = self.config, self.config.base
        size = jax.tree.leaves(self.base)[0].dtype.itemsize
        batch_size, seq_len = self.batch.tokens.shape
        rows = batch_size // (mesh.num_row_shards * config.accumulation_steps)
        tokens = rows * seq_len

        # The arrays that all layers have alike. Heads that `tensor` does not divide are everywhere.
        heads = layer.num_heads / (mesh.tensor if layer.num_kv_heads % mesh.tensor == 0 else 1)
        scores = FLOAT32 * rows * heads * seq_len**2
        inner = size * tokens * 3 * layer.intermediate_size / mesh.tensor
        state = size * tokens * layer.hidden_size
        logits = FLOAT32 * min(config.loss_chunk, tokens) * layer.vocab_size / mesh.tensor

        # The teacher keeps only the states that the head reads, so one of its layers counts.
        teacher = 2 * scores + inner + 6 * state
        kept = (len(config.head.config.features) + 1) * state

        # The head's layers keep everything for the way back: the attention's scores and weights,
        # the MLP's inner states, some states of width D; with `remat` the scores of one layer at a
        # time. Every layer of a head has one leaf `qkv`, whatever the method.
        leaves = jax.tree_util.tree_leaves_with_path(self.state.params)
        num_layers = sum(path[-1].key == "qkv" for path, _ in leaves)
        positions = config.head.config.num_positions
        with_scores = min(num_layers, 1) if config.remat else num_layers
        # Blocks at few anchors have their slots beside the text, and are all that is trained.
        anchors = min(config.head.module.num_anchors, seq_len)
        slots = anchors * (positions + 1) / seq_len
        scores, trained = (scores * slots, anchors / seq_len) if anchors else (scores, 1)
        of_layers = num_layers * (1 + slots) * (inner + 6 * state)
        head = with_scores * 2 * scores + of_layers + positions * trained * 6 * state

        # A few chunks of logits live together, and two states of each position.
        loss = 4 * logits + 2 * positions * trained * state
        return int(kept + max(teacher, head + loss))


def step_shapes(settings: TrainSettings, dtype: jnp.dtype) -> StepShapes:
    """Return the step of a run with these settings on one device, from the base's config alone.

    Raises UserError for settings that cannot work.
    """
    base = describe_base(settings.base)
    head = make_head(settings, base)
    pipeline_config(settings, base, head)  # raises for rows that cannot be
    if settings.draft_vocab is not None:  # any tokens will do: the shapes are the same
        ids = tuple(range(min(settings.draft_vocab, base.config.vocab_size)))
        head = registry.head(dataclasses.replace(head.config, draft_to_target=ids))

    config = step_config(settings, base.config, head)
    # The base's weights are traced as shapes, so none are read or allocated.
    params = base_shapes(base.config, dtype)
    return StepShapes(
        config=config,
        state=jax.eval_shape(lambda base: init_state(config, base, settings.seed), params),
        base=jax.eval_shape(lambda base: with_draft_rows(base, head.config), params),
        batch=_batch_shapes(settings, head, dtype),
    )


def _batch_shapes(settings: TrainSettings, head: DraftHead, dtype: jnp.dtype) -> Batch:
    shape = settings.batch_size, settings.seq_len
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    hidden = None  # the teacher runs within the step
    if settings.teacher == "cached":
        states = jax.ShapeDtypeStruct((*shape, head.config.layer.hidden_size), dtype)
        hidden = dict.fromkeys(stored_names(head.config.features), states)
    # Shapes stand where the arrays will be.
    fields: tuple[Any, ...] = (ids, ids, ids, jax.ShapeDtypeStruct(shape, bool), hidden)
    return Batch(*fields)


def gigabytes(number: float) -> str:
    """Return bytes for a reader."""
    return f"{number / 1e9:.2f} GB"
