"""The settings of `prepare`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.spec import NO_DRAFT, ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import setting


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """The flags of `prepare` beside those of `ModelSpec` and `SamplingParams`.

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
    feature_dtype: str = setting("bfloat16", "how they are kept", choices=("bfloat16", "float32"))
    batch_size: int = setting(8, "rows that the base reads at once", least=1)
    yes: bool = setting(False, "agree to more than 10 GB of activations")
    overwrite: bool = setting(False, "start --output anew, whatever is there")
    regenerate: bool = setting(
        False, "replace the answers by those that the base itself gives; --draft makes it faster"
    )
    max_new_tokens: int = setting(512, "tokens of an answer at most", least=1)

    def __post_init__(self):
        # A flag that would do nothing is a misunderstanding.
        if self.preview and self.runs_base:
            raise UserError("--preview cannot be combined with --regenerate or --features")
        # Only --regenerate decodes with a draft and its tree.
        given = {"draft": self.spec.draft != NO_DRAFT, "tree": self.spec.tree is not None}
        for name, is_given in given.items():
            if is_given and not self.regenerate:
                raise UserError(f"--{name} is for --regenerate, which is missing")
        # Without a base to run, the data are only tokenised, on the host.
        if self.spec.mesh is not None and not self.runs_base:
            raise UserError(f"--mesh={self.spec.mesh} is for --regenerate and --features")

    @property
    def runs_base(self) -> bool:
        """Whether the base is run, and not only its tokenizer."""
        return self.regenerate or self.features != "none"

    @property
    def directory(self) -> Path:
        """The folder to write."""
        return Path(self.output or self.workdir).expanduser()
