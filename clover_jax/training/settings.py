"""What a training run depends on, and which of it may change when the run is taken up again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from clover_jax.config import JsonConfig, LossSpec
from clover_jax.errors import UserError
from clover_jax.storage.files import write_json
from clover_jax.storage.json_files import read_json_object

SETTINGS = "settings.json"

# These change what is reported and when, how a batch is gone through, or where the schedule ends;
# not what was learnt so far.
MAY_CHANGE = frozenset(
    {
        "steps",
        "gradient_accumulation_steps",
        "remat",
        "log_every",
        "checkpoint_every",
        "eval_every",
        "eval_prompts",
        "eval_num_prompts",
        "eval_max_new_tokens",
        "tree",
    }
)


@dataclasses.dataclass(frozen=True)
class TrainSettings(JsonConfig):
    """The flags of `train`, whose help says what each means; None takes the method's own."""

    base: str = "builtin:tiny"
    dtype: str = "auto"
    seed: int = 0
    drafter: str = "clover2"
    data: str = "builtin:python"
    teacher: str = "online"
    chat_template: str | None = None
    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 512
    gradient_accumulation_steps: int = 1
    remat: bool = False
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    schedule: str = "linear"
    adam_b2: float = 0.95
    weight_decay: float = 0.01
    clip_value: float = 0.5
    drafter_options: str | None = None
    num_positions: int | None = None
    num_augmenting_layers: int | None = None
    draft_rope_theta: float | None = None
    draft_vocab: int | None = None
    regression_weight: float | None = None
    soft_ce_weight: float | None = None
    hard_ce_weight: float | None = None
    total_variation_weight: float | None = None
    position_decay: float | None = None
    label_mask: bool = False
    loss_chunk: int = 512
    log_every: int = 10
    checkpoint_every: int = 500
    eval_every: int = 0
    eval_prompts: str | None = None
    eval_num_prompts: int = 16
    eval_max_new_tokens: int = 64
    tree: str | None = None

    def loss(self, default: LossSpec) -> LossSpec:
        """Return the method's loss with the weights that were given."""
        given = {
            "regression": self.regression_weight,
            "soft_ce": self.soft_ce_weight,
            "hard_ce": self.hard_ce_weight,
            "total_variation": self.total_variation_weight,
            "decay": self.position_decay,
            "label_mask": self.label_mask or None,
        }
        return dataclasses.replace(default, **{k: v for k, v in given.items() if v is not None})


def recorded_settings(workdir: Path) -> TrainSettings | None:
    """Return the settings of the run in a workdir; None where none was started."""
    path = workdir / SETTINGS
    return TrainSettings.from_dict(read_json_object(path)["settings"]) if path.exists() else None


def check_resumable(
    workdir: Path, settings: TrainSettings, identity: dict[str, str], learnt: bool
) -> None:
    """Record the settings of a run; refuse to go on with what was learnt with other ones.

    identity: flag name -> hash of what it names ("base", "data"): a folder may have moved, and a
        file may have other contents under the old name.
    learnt: whether the workdir holds anything that depends on them; a run that was refused before
        its first step may be corrected.
    Raises UserError naming the flag.
    """
    path = workdir / SETTINGS
    now = {"settings": settings.to_dict(), "identity": identity}
    before = read_json_object(path) if path.exists() else None
    if before is not None and learnt:
        for name, value in identity.items():
            if before["identity"].get(name) != value:
                raise UserError(
                    f"{workdir} holds a run with another --{name} "
                    f"({before['settings'].get(name)!r} then, {getattr(settings, name)!r} now, "
                    "with other contents); give the one it began with, or another --workdir"
                )
        _refuse_changes(workdir, before["settings"], now["settings"], set(identity))
    if before != json.loads(json.dumps(now)):
        write_json(path, now)


def _refuse_changes(
    workdir: Path, before: dict[str, Any], now: dict[str, Any], compared: set[str]
) -> None:
    for name in sorted(now.keys() - MAY_CHANGE - compared):
        if before.get(name) != now[name]:
            raise UserError(
                f"{workdir} holds a run with --{name}={before.get(name)}, not {now[name]}; give "
                "the flags it began with, or another --workdir"
            )
