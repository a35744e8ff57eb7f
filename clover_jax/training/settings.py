"""The settings of a training run, and which of them may change when it is resumed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from clover_jax.errors import UserError
from clover_jax.field_types import (
    COMMON,
    ChatSettings,
    CommonSettings,
    check_settings,
    declared_settings,
    setting,
)
from clover_jax.storage.files import write_json
from clover_jax.storage.json_files import read_json_object

SETTINGS = "settings.json"

# One for each heading of `--help`. What is measured may change when a run resumes.
_data = functools.partial(setting, group="data")
_head = functools.partial(setting, group="head")
_optimiser = functools.partial(setting, group="optimiser")
_loss = functools.partial(setting, group="loss")
_memory = functools.partial(setting, group="memory")
_measuring = functools.partial(setting, group="measuring", may_change=True)


@dataclasses.dataclass(frozen=True)
class TrainSettings(ChatSettings, CommonSettings):
    """The flags of `train`; None takes the method's own. Raises UserError for a bad value.

    Settings that may change in a resumed run decide what is reported and when, how a batch is
    divided, or where the schedule ends, and nothing about what was learnt so far.
    """

    drafter: str = _head("clover2", "the kind of draft head, or FILE.py:CLASS for one of your own")
    data: str = _data("builtin:python", "training data: paths or globs, comma-separated")
    teacher: str = _data(
        "online",
        "where the base's activations come from: online runs it in every step, cached reads what "
        "`prepare --features` has put into --data",
        choices=("online", "cached"),
    )
    steps: int = _optimiser(1000, "optimiser steps", least=1, may_change=True)
    batch_size: int = _data(8, "rows of a batch", least=1)
    seq_len: int = _data(512, "tokens of a row; documents are packed into rows", least=2)
    gradient_accumulation_steps: int = _memory(
        1,
        "parts of a batch, one after another, whose gradients are summed: less memory, same values "
        "but for noise that is drawn and candidate_ce",
        least=1,
        may_change=True,
    )
    remat: bool = _memory(
        False,
        "keep the head's products with weights only, and compute the rest again for the gradient: "
        "less memory, same values",
        may_change=True,
    )
    learning_rate: float = _optimiser(1e-3, "peak learning rate; it falls to 0 at the last step")
    warmup_steps: int = _optimiser(100, "steps over which the rate rises to its peak")
    schedule: str = _optimiser("linear", "how the rate falls", choices=("linear", "cosine"))
    adam_b2: float = _optimiser(0.95, "AdamW's decay of squared gradients")
    weight_decay: float = _optimiser(0.01, "AdamW's weight decay")
    clip_value: float = _optimiser(0.5, "gradient values are clipped to this; 0: never")
    drafter_options: str | None = _head(
        None, "what this kind of head can be told, as name=value,...; an unknown name lists them"
    )
    num_positions: int | None = _head(None, "draft positions to train [the method's]", least=1)
    num_augmenting_layers: int | None = _head(None, "layers of the Augmenting Block [the method's]")
    draft_rope_theta: float | None = _head(
        None, "rotary base of the head [the base model's]", least=1.0
    )
    draft_vocab: int | None = _head(
        None,
        "tokens that the head can propose, the most frequent of the data [the base's vocabulary]",
        least=1,
    )
    loss: str | None = _loss(
        None,
        "parts of the loss as name=value,..., such as lk=1,soft_ce=0 or dpace=0.5; an unknown name "
        "lists them [each is the method's]",
    )
    regression_weight: float | None = _loss(None, "weight of the regression loss [the method's]")
    soft_ce_weight: float | None = _loss(
        None, "weight of the cross-entropy to the base [the method's]"
    )
    hard_ce_weight: float | None = _loss(
        None, "weight of the cross-entropy to the text [the method's]"
    )
    total_variation_weight: float | None = _loss(
        None, "weight of the share of drawn drafts that the base would refuse [the method's]"
    )
    position_decay: float | None = _loss(
        None, "position i weighs this to the power of i [the method's]"
    )
    label_mask: bool = _loss(
        False, "leave out of the loss what the base's own choice would not have reached"
    )
    loss_chunk: int = _memory(512, "positions whose logits exist at a time", least=1)
    log_every: int = _measuring(10, "steps between rows of metrics.jsonl", least=1)
    checkpoint_every: int = _measuring(500, "steps between checkpoints; 0: only at the end")
    eval_every: int = _measuring(
        0, "steps between measurements by decoding; 0: none, not even at the end"
    )
    eval_prompts: str | None = _measuring(
        None, "prompts to decode [the base's own, else from held-out data]"
    )
    eval_num_prompts: int = _measuring(16, "prompts to decode at most", least=1)
    eval_max_new_tokens: int = _measuring(64, "tokens to decode for each prompt", least=2)
    tree: str | None = _measuring(
        None,
        "the token tree to decode with; recorded in the draft [paper25, or clover4 where the head "
        "is too shallow for it]",
    )

    overwrite: bool = setting(
        False,
        "delete the run that is in the workdir and start again [resume it]",
        group=COMMON,
        may_change=True,
    )

    def __post_init__(self):
        check_settings(self)


def recorded_settings(workdir: Path) -> TrainSettings | None:
    """Return the settings of the run in a workdir; None where none was started."""
    path = workdir / SETTINGS
    return TrainSettings.from_dict(read_json_object(path)["settings"]) if path.exists() else None


def check_resumable(
    workdir: Path, settings: TrainSettings, identity: dict[str, str | None], learnt: bool
) -> None:
    """Refuse to resume a run that was trained with other settings.

    identity: name -> hash of what the run depends on: a folder may have moved, and a file may have
        other contents under the old name. Earlier versions recorded some of them only.
    learnt: whether the workdir holds anything that depends on them; a run that was refused before
        its first step may be corrected.
    Raises UserError naming the flag.
    """
    # Read back as settings: what this version added has its default in runs of earlier ones.
    recorded = recorded_settings(workdir)
    if recorded is None or not learnt:
        return
    before, now = recorded.to_dict(), settings.to_dict()

    # By content first: under another name the same data are no change.
    began_with = read_json_object(workdir / SETTINGS)["identity"]
    for name, value in identity.items():
        if began_with.get(name, value) != value:
            shown = f"{name} (that of --base={settings.base} or of --data has changed)"
            if name in now:
                then, given = before[name], now[name]
                shown = f"--{name} ({then!r} then, {given!r} now, with other contents)"
            raise UserError(
                f"{workdir} holds a run with another {shown}; give the one it began with, or "
                "another --workdir"
            )

    # Then the flags by value, except those whose contents were just compared.
    declared = declared_settings(TrainSettings)
    fixed = {name for name in declared if not declared[name].may_change}
    for name in sorted(fixed - identity.keys()):
        if before[name] != now[name]:
            raise UserError(
                f"{workdir} holds a run with --{name}={before[name]}, not {now[name]}; give the "
                "flags it began with, or another --workdir"
            )


def record_settings(
    workdir: Path, settings: TrainSettings, identity: dict[str, str | None]
) -> None:
    """Record the settings of the run in a workdir, for `check_resumable`."""
    write_json(workdir / SETTINGS, {"settings": settings.to_dict(), "identity": identity})
