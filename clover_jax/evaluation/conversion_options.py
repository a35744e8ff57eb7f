"""The options of `convert`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools

from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import setting

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


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The flags of `convert` in addition to those of `ModelSpec`, which names the head's base."""

    spec: ModelSpec
    # Both are refused where they are missing, so readers find text.
    input: str = setting("", "the head to convert")
    output: str = setting("", "folder to write")
    to: str = setting("orbax", "layout to write", choices=TARGETS)
    cut_vocab: bool = setting(False, "leave out rows beyond the base's vocabulary (padding)")
    overwrite: bool = setting(False, "replace the draft head at --output")
    verify: bool = _verifying(False, "decode with both heads; fail where accepted lengths differ")
    prompts: str | None = _verifying(
        None, "prompts to verify with [the base's prompts.jsonl, else tokens of its vocabulary]"
    )
    num_prompts: int = _verifying(8, "maximum number of prompts to verify with", least=1)
    max_new_tokens: int = _verifying(64, "tokens to decode for each prompt", least=2)

    def __post_init__(self):
        for name in ("input", "output"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing; give the folder")
        # A flag without an effect is a misunderstanding.
        if self.prompts and not self.verify:
            raise UserError(f"--prompts={self.prompts} needs --verify")
