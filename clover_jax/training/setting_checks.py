"""What a value of `TrainSettings` must be: the flags of `train` say the same to its command."""

from __future__ import annotations

import types
import typing
from typing import Any

from clover_jax.errors import UserError
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
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


def check_settings(settings: TrainSettings) -> None:
    """Raise UserError naming the first setting of a wrong type, or a number that is too small."""
    for name, hint in typing.get_type_hints(TrainSettings).items():
        value = getattr(settings, name)
        if not any(_is_a(kind, value) for kind in _kinds(hint)):
            wanted = " or ".join(_WORDS.get(kind, "None") for kind in _kinds(hint))
            raise UserError(f"{name} must be {wanted}, not {value!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not value >= LEAST.get(name, 0):
            raise UserError(f"{name} ({value}) must be at least {LEAST.get(name, 0)}")


def _kinds(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _is_a(kind: type, value: Any) -> bool:
    """Return whether a value is of a kind; a whole number is a number too, True is none."""
    if kind is bool or not isinstance(value, bool):
        return isinstance(value, (int, float) if kind is float else kind)
    return False
