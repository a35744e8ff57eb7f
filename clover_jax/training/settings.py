"""The settings of `train` and `prepare`, and which of `train`'s may change when it is resumed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.spec import NO_DRAFT, ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import (
    COMMON,
    ChatSettings,
    CommonSettings,
    check_settings,
    check_unread,
    declared_settings,
    setting,
)
from clover_jax.runtime.files import read_json_object, write_json

SETTINGS = "settings.json"
# Flags of earlier versions that set one part of the loss, and the part's name in --loss.
_EARLIER_LOSS_FLAGS = {
    "regression_weight": "regression",
    "soft_ce_weight": "soft_ce",
    "hard_ce_weight": "hard_ce",
    "total_variation_weight": "total_variation",
    "position_decay": "decay",
}

# One for each heading of `--help`. What is measured may change when a run resumes.
_data = functools.partial(setting, group="data")
_head = functools.partial(setting, group="head")
_optimizer = functools.partial(setting, group="optimizer")
_loss = functools.partial(setting, group="loss")
_memory = functools.partial(setting, group="memory")
_measuring = functools.partial(setting, group="measuring", may_change=True)


@dataclasses.dataclass(frozen=True)
class TrainSettings(ChatSettings, CommonSettings):
    """The flags of `train`; None is the method's default. Raises UserError for a bad value.

    Settings that may change in a resumed run affect reports, how a batch is divided, or where the
    schedule ends, but nothing that was learned so far.
    """

    drafter: str = _head("clover2", "the kind of draft head, or FILE.py:CLASS for one of your own")
    data: str = _data("builtin:python", "training data: paths or globs, comma-separated")
    teacher: str = _data(
        "online",
        "source of the base's activations: online runs the base in every step, cached reads the "
        "activations that `prepare --features` stored in --data",
        choices=("online", "cached"),
    )
    steps: int = _optimizer(1000, "optimizer steps", least=1, may_change=True)
    batch_size: int = _data(8, "rows per batch", least=1)
    seq_len: int = _data(512, "tokens per row; documents are packed into rows", least=2)
    gradient_accumulation_steps: int = _memory(
        1,
        "split each batch into this many parts and sum their gradients: less memory, same values "
        "except for random noise, candidate_ce and how a fresh head begins",
        least=1,
        may_change=True,
    )
    remat: bool = _memory(
        False,
        "gradient checkpointing of the head: less memory, more time, same values",
        may_change=True,
    )
    learning_rate: float = _optimizer(1e-3, "peak learning rate; it decays to 0 at the last step")
    warmup_steps: int = _optimizer(100, "steps of linear warmup to the peak learning rate")
    schedule: str = _optimizer("linear", "decay of the learning rate", choices=("linear", "cosine"))
    adam_b2: float = _optimizer(0.95, "AdamW's second-moment decay, beta 2")
    weight_decay: float = _optimizer(0.01, "AdamW's weight decay")
    clip_value: float = _optimizer(
        0.5, "each gradient value is clipped to this; 0 disables clipping"
    )
    drafter_options: str | None = _head(
        None, "options of this kind of head, as name=value,...; give an unknown name to list them"
    )
    num_positions: int | None = _head(None, "draft positions to train [the method's]", least=1)
    num_augmenting_layers: int | None = _head(None, "layers of the Augmenting Block [the method's]")
    draft_rope_theta: float | None = _head(
        None, "RoPE theta of the head, without scaling [the base model's rotation]", least=1.0
    )
    draft_vocab: int | None = _head(
        None,
        "restrict the head to the N most frequent tokens of the data [the base's vocabulary]",
        least=1,
    )
    loss: str | None = _loss(
        None,
        "weights and options of the loss as name=value,..., such as regression=0,soft_ce=0.5 or "
        "dpace=0.5; give an unknown name to list them [the method's]",
        may_change=True,  # as written: `run_training` compares what it says
    )
    loss_chunk: int = _memory(512, "positions whose logits are in memory at a time", least=1)
    log_every: int = _measuring(10, "steps between rows of metrics.jsonl", least=1)
    checkpoint_every: int = _measuring(500, "steps between checkpoints; 0: only at the end")
    eval_every: int = _measuring(
        500,
        "steps between evaluations, which decode prompts to measure tau, and one at the end; 0 "
        "disables evaluation, also at the end",
    )
    eval_prompts: str | None = _measuring(
        None, "file of prompts to decode [prompts.jsonl of the base's folder, else held-out data]"
    )
    eval_num_prompts: int = _measuring(16, "how many prompts to decode, at most", least=1)
    eval_max_new_tokens: int = _measuring(64, "tokens to decode per prompt", least=2)
    tree: str | None = _measuring(
        None,
        "token tree to evaluate with, which the draft records [paper25, or clover4 if the head is "
        "too shallow for it]",
    )

    overwrite: bool = setting(
        False,
        "delete the run that is in the workdir and start again [resume it]",
        group=COMMON,
        may_change=True,
    )

    def __post_init__(self):
        check_settings(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainSettings:
        """Build from `to_dict`'s output, also that of earlier versions.

        Raises ValueError for a run that used `label_mask`, which was dropped.
        """
        values = dict(values)
        if values.pop("label_mask", False):
            raise ValueError("label_mask was dropped from training")
        given = {name: values.pop(flag, None) for flag, name in _EARLIER_LOSS_FLAGS.items()}
        parts = [values.get("loss")]
        parts += [f"{name}={value:g}" for name, value in given.items() if value is not None]
        return super().from_dict(values | {"loss": ",".join(filter(None, parts)) or None})


def recorded_settings(workdir: Path) -> TrainSettings | None:
    """Return the settings of the run in a workdir; None where none was started."""
    path = workdir / SETTINGS
    if not path.exists():
        return None
    try:
        return TrainSettings.from_dict(read_json_object(path)["settings"])
    except ValueError as error:
        raise UserError(f"{path}: {error}; give another --workdir") from error


def check_resumable(
    workdir: Path, settings: TrainSettings, identity: dict[str, str | None], learned: bool
) -> None:
    """Refuse to resume a run that was trained with other settings.

    identity: name -> hash of what the run depends on: a folder may have moved, and a file may have
        other contents under the old name. Earlier versions recorded some of them only.
    learned: whether the workdir holds anything that depends on them; a run that was refused before
        its first step may be corrected.
    Raises UserError naming the flag.
    """
    # Read back as settings: fields that this version added have their defaults in earlier runs.
    recorded = recorded_settings(workdir)
    if recorded is None or not learned:
        return
    before, now = recorded.to_dict(), settings.to_dict()

    # By content first: the same data under another name do not count as a change.
    began_with = read_json_object(workdir / SETTINGS)["identity"]
    for name, value in identity.items():
        if began_with.get(name, value) != value:
            shown = f"{name} (that of --base={settings.base} or of --data has changed)"
            if name in now:
                then, given = before[name], now[name]
                shown = f"--{name} ({then!r} then, {given!r} now, with other contents)"
            raise UserError(
                f"{workdir} holds a run with another {shown}; pass the one it began with, or "
                "another --workdir"
            )

    # Then the flags by value, except those whose contents were just compared.
    declared = declared_settings(TrainSettings)
    fixed = {name for name in declared if not declared[name].may_change}
    for name in sorted(fixed - identity.keys()):
        if before[name] != now[name]:
            raise UserError(
                f"{workdir} holds a run with --{name}={before[name]}, not {now[name]}; pass the "
                "flags it began with, or another --workdir"
            )


def record_settings(
    workdir: Path, settings: TrainSettings, identity: dict[str, str | None]
) -> None:
    """Record the settings of the run in a workdir, for `check_resumable`."""
    write_json(workdir / SETTINGS, {"settings": settings.to_dict(), "identity": identity})


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """The flags of `prepare` in addition to `ModelSpec` and `SamplingParams`.

    data, seq_len: as in `TrainSettings`.
    workdir: where the data go without `output`.
    """

    spec: ModelSpec
    warping: SamplingParams
    seed: int
    workdir: Path
    data: str
    seq_len: int
    output: str | None = setting(None, "folder to write [the workdir]")
    max_truncated: float | None = setting(
        None,
        "refuse data where a larger share of the conversations is longer than a row [only warn]",
        most=1.0,
    )
    preview: bool = setting(False, "show some samples with what is imitated marked; write nothing")
    preview_samples: int = setting(3, "samples to show", least=1)
    features: str = setting(
        "none",
        "activations to keep for --teacher=cached: a drafter's name for what it is trained on, or "
        "names such as pre_norm,post_norm,layer_2",
    )
    feature_dtype: str = setting("bfloat16", "dtype of --features", choices=("bfloat16", "float32"))
    batch_size: int = setting(8, "rows that the base reads at once", least=1)
    yes: bool = setting(False, "agree to more than 10 GB of activations")
    overwrite: bool = setting(False, "start --output again and replace what is there")
    regenerate: bool = setting(
        False, "replace the answers by those that the base itself gives; --draft makes it faster"
    )
    max_new_tokens: int = setting(512, "tokens of an answer at most", least=1)

    def __post_init__(self):
        if self.preview and self.runs_base:
            raise UserError("--preview cannot be combined with --regenerate or --features")
        check_unread(self, ["preview_samples"], "preview", self.preview)
        check_unread(self, ["feature_dtype", "yes"], "features", self.features != "none")
        check_unread(self, ["max_new_tokens"], "regenerate", self.regenerate)
        check_unread(self.warping, list(vars(self.warping)), "regenerate", self.regenerate)
        # Only --regenerate decodes with a draft and its tree.
        given = {"draft": self.spec.draft != NO_DRAFT, "tree": self.spec.tree is not None}
        for name, is_given in given.items():
            if is_given and not self.regenerate:
                raise UserError(f"--{name} is for --regenerate, which is missing")
        # Without a base to run, the data are only tokenized, on the host.
        if self.spec.mesh is not None and not self.runs_base:
            raise UserError(f"--mesh={self.spec.mesh} is for --regenerate and --features")

    @property
    def runs_base(self) -> bool:
        return self.regenerate or self.features != "none"

    @property
    def directory(self) -> Path:
        return Path(self.output or self.workdir).expanduser()
