"""What a value of `TrainSettings` must be: the flags of `train` say the same to its command."""

from __future__ import annotations

import dataclasses

from clover_jax.errors import UserError
from clover_jax.field_types import check_types
from clover_jax.training.settings import TrainSettings

# Of numbers; the others may be 0.
LEAST = {
    "steps": 1,
    "batch_size": 1,
    "seq_len": 2,
    "gradient_accumulation_steps": 1,
    "num_positions": 1,
    "draft_rope_theta": 1.0,
    "draft_vocab": 1,
    "loss_chunk": 1,
    "log_every": 1,
    "eval_num_prompts": 1,
    "eval_max_new_tokens": 2,
}


def check_settings(settings: TrainSettings) -> None:
    """Raise UserError naming the first setting of a wrong type, or a number that is too small."""
    check_types(settings)
    for name, value in dataclasses.asdict(settings).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not value >= LEAST.get(name, 0):
            raise UserError(f"{name} ({value}) must be at least {LEAST.get(name, 0)}")
