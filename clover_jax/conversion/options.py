"""The options of `convert`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools

from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.loading.spec import ModelSpec

# Written out, as the table of layouts imports JAX and `--help` must not; a test compares both.
TARGETS = (
    "orbax",
    "clover2",
    "eagle",
    "eagle_vllm",
    "eagle_sglang",
    "eagle3",
    "dflash2",
    "medusa",
    "medusa_vllm",
    "speculators",
)

_verifying = functools.partial(setting, group="verifying")
_publishing = functools.partial(setting, group="publishing")


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The flags of `convert` beside those of `ModelSpec`, whose base the head is of."""

    spec: ModelSpec
    # Both are refused where they are missing, so readers find text.
    input: str = setting(None, "the head to convert")
    output: str = setting(None, "folder to write")
    to: str = setting("orbax", "layout to write", choices=TARGETS)
    cut_vocab: bool = setting(False, "leave out rows beyond the base's vocabulary (padding)")
    overwrite: bool = setting(False, "replace what is at --output")
    verify: bool = _verifying(False, "decode with both heads; fail where accepted lengths differ")
    prompts: str | None = _verifying(None, "prompts to verify with [the base's, else of the data]")
    num_prompts: int = _verifying(8, "prompts to verify with, at most", least=1)
    max_new_tokens: int = _verifying(64, "tokens to decode for each of them", least=2)
    push: str | None = _publishing(None, "hub repository to upload the result to, OWNER/NAME")
    card_only: bool = _publishing(False, "with --push: write the model card, upload nothing")
    base_model: str | None = _publishing(None, "with --push: the base's name on the hub [--base]")
    license: str | None = _publishing(None, "with --push: the head's license [the base's]")

    def __post_init__(self):
        for name in ("input", "output"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing; give the folder")
        # A flag that would do nothing is a misunderstanding.
        if self.prompts and not self.verify:
            raise UserError(f"--prompts={self.prompts} are for --verify, which is missing")
        if self.card_only and not self.push:
            raise UserError("--card_only prepares what --push would upload; give --push=OWNER/NAME")
