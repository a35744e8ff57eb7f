"""From settings to the parts of a run: dtype, head, optimiser, pipeline, prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

from clover_jax.config import RopeConfig
from clover_jax.data.pipeline import PipelineConfig
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.base import BaseModel
from clover_jax.training.optimizer import OptimizerConfig
from clover_jax.training.settings import TrainSettings


def make_head(settings: TrainSettings, base: BaseModel) -> DraftHead:
    """Return the head that the settings describe, without params.

    Raises UserError for a setting that this kind of drafter does not have or cannot take.
    """
    options: dict[str, Any] = {
        "num_positions": settings.num_positions,
        "num_augmenting_layers": settings.num_augmenting_layers,
    }
    if settings.draft_rope_theta is not None:
        options["rope"] = RopeConfig(theta=settings.draft_rope_theta)
    options = {name: value for name, value in options.items() if value is not None}
    try:
        config = registry.config_for_base(settings.drafter, base.config, **options)
        config = dataclasses.replace(config, loss=settings.loss(config.loss))
    except TypeError as error:
        raise UserError(f"--drafter={settings.drafter}: {error}") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    return registry.head(config)


def optimizer_config(settings: TrainSettings) -> OptimizerConfig:
    """Return the optimiser's settings; a warm-up longer than the run is shortened to it.

    Raises UserError for impossible values.
    """
    try:
        return OptimizerConfig(
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            warmup_steps=min(settings.warmup_steps, settings.steps),
            weight_decay=settings.weight_decay,
            clip_value=settings.clip_value,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def pipeline_config(settings: TrainSettings, base: BaseModel, head: DraftHead) -> PipelineConfig:
    """Return the shapes of the batches.

    Raises UserError for rows too short for every draft position or longer than the base's context.
    """
    shortest, longest = head.config.num_positions + 1, base.config.max_position_embeddings
    if not shortest <= settings.seq_len <= longest:
        raise UserError(
            f"--seq_len={settings.seq_len} must lie between {shortest} (num_positions + 1) and "
            f"{longest}, the base's context"
        )
    return PipelineConfig(settings.batch_size, settings.seq_len, settings.seed)
