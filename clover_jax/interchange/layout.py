"""Another project's layout of draft heads, as data: enough to read it and to write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig, DrafterConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.tensor_map import Leaf


@dataclasses.dataclass(frozen=True)
class Layout:
    """One format of draft heads; the functions take the config of the kind of head that it holds.

    name: as `convert` reports it.
    to: as `convert --to` calls it; one value may stand for a layout of each of several kinds.
    kind: the drafter whose heads it holds.
    parse_config: from the fields of config.json, its path (for messages, and for tensors beside
        it) and the base's config, the head's config. Raises UserError for missing or impossible
        fields.
    leaves: where the stored tensors lie in the head's params.
    config_fields: the content of config.json for a head of a base.
    check_exportable: raises UserError for a head that readers of the layout would run differently.
    copies: stored names of frozen copies of base matrices -> "lm_head" or "embedding".
    more_tensors: stored tensors that follow from the config.
    optional: names of redundant tensors that may be stored.
    file: the name of the weights' file.
    warning: printed when this layout is written.
    """

    name: str
    to: str
    kind: str
    # Any stands for a config of this layout's `kind`.
    parse_config: Callable[[dict[str, Any], Path, BaseConfig], Any]
    leaves: Callable[[Any], list[Leaf]]
    config_fields: Callable[[Any, BaseModel], dict[str, Any]]
    check_exportable: Callable[[Any, BaseConfig], None]
    # Fields that only some layouts need.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more_tensors: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
    optional: tuple[str, ...] = ()
    file: str = "model.safetensors"
    warning: str | None = None


def refuse_draft_vocabulary(config: DrafterConfig, layout: str) -> None:
    """Raise UserError for a head over a part of the vocabulary, which most layouts cannot say."""
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {config.draft_vocab_size} of the base's {config.vocab_size} "
            f"tokens, and the {layout} layout has no draft vocabulary; train one without "
            "--draft_vocab to export it"
        )
