"""Draft heads by the name that `--draft` gives: read from a folder, or made for the base."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.interchange.directory import Draft, load_draft
from clover_jax.loading.spec import RANDOM, ModelSpec
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.shapes import cast_shapes, random_params
from clover_jax.tokenizers.tokenizer import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a draft without weights costs is the base's forward, so its trees are deep.
TREES = {"lookup": "copy:25", "recycle": "dynamic:25:20:3"}


def needs_no_file(draft: str) -> bool:
    """Return whether `--draft` names a head that is made rather than read."""
    return draft.startswith(RANDOM) or draft in registry.TRAINING_FREE


def open_head(spec: ModelSpec, base: BaseModel, tokenizer: PreTrainedTokenizerBase | None) -> Draft:
    """Return the head that a spec names, in the base's dtype.

    Raises UserError for one that is broken, or was trained for another base or chat template.
    """
    if needs_no_file(spec.draft):
        # The seed differs from that of a base with random weights, which is 0.
        draft = fresh_head(spec.draft, base)
        return dataclasses.replace(draft, params=random_params(draft.params, seed=1))

    draft = load_draft(
        spec.draft,
        base,
        base.dtype,
        allow_base_mismatch=spec.allow_base_mismatch,
        rope_theta=spec.draft_rope_theta,
    )
    if not spec.allow_base_mismatch:
        _check_template(draft, tokenizer)
    return draft


def fresh_head(name: str, base: BaseModel) -> Draft:
    """Return a draft of shapes: a head as `train` would begin one for this base."""
    # "random:KIND:NAME=VALUE,...", or the bare kind of a head that has no weights.
    kind, _, text = name.removeprefix(RANDOM).partition(":")
    options = registry.parse_options(f"--draft={RANDOM}{kind}:", text, kind)
    try:
        head = registry.head(registry.config_for_base(kind, base.config, **options))
    except ValueError as error:
        raise UserError(f"--draft={name}: {error}") from error
    # In the base's type, as a head that is read would be.
    shapes = cast_shapes(registry.init_shapes(head, base.params), base.dtype)
    return Draft(head, shapes, TREES.get(name), {}, name)


def _check_template(draft: Draft, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise UserError where a draft was trained with another chat template than the one in use.

    A draft does not bring its own: with it and without it a conversation is the same tokens.
    """
    flags = draft.provenance.get("flags") or {}
    # Older drafts recorded the flag at most, so their text is not known.
    name, trained, ours = flags.get("chat_template"), draft.chat_template, template_text(tokenizer)
    if tokenizer is None or (trained is None and (name is None or ours is not None)):
        return
    if trained is None or ours is None or trained.strip("\n") != ours.strip("\n"):
        theirs = "the base's own" if name is None else f"--chat_template={name}"
        raise UserError(
            f"draft {draft.source} was trained with another chat template than the one in use: "
            f"{theirs}; decode with that (its draft.json has the text), or give "
            "--allow_base_mismatch"
        )
