"""Drafts ready to decode with: native draft directories written, heads in any layout loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from clover_jax.array_types import FLOAT32, Params
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.card import Card, write_native
from clover_jax.checkpoints.fingerprint import BaseFingerprint
from clover_jax.checkpoints.loading import place_as
from clover_jax.checkpoints.stored_head import StoredHead, open_head
from clover_jax.config import DrafterConfig
from clover_jax.drafters import registry


@dataclasses.dataclass(frozen=True)
class Draft:
    """A loaded draft.

    head: module and config.
    params: the head's params.
    tree: the name of the tree that it was measured with, or None.
    provenance: how it was made, as recorded by its writer.
    source: the name given by the user.
    chat_template: text of the template used in training; None for none or an unknown one.
    """

    head: registry.DraftHead
    # Not in the repr: an error message with all arrays in it cannot be read.
    params: Params = dataclasses.field(repr=False)
    tree: str | None
    provenance: dict[str, Any]
    source: str
    chat_template: str | None = None


def save_draft(
    directory: Path,
    config: DrafterConfig,
    params: Params,
    tree: str | None,
    base: BaseFingerprint,
    provenance: dict[str, Any],
    chat_template: str | None = None,
) -> None:
    """Write a native draft directory; the old one stays until the new one is complete.

    provenance: any JSON values: flags, versions, git revision, data hash, steps, tau.
    chat_template: text of the template used in training.
    """
    card = Card(config, base, tree, provenance, chat_template=chat_template)
    write_native(directory, card, params)


def load_draft(
    source: str | Path,
    base: BaseModel,
    dtype: jnp.dtype = FLOAT32,
    *,
    allow_base_mismatch: bool = False,
    rope_theta: float | None = None,
) -> Draft:
    """Load a draft for a base.

    source: a native draft directory, a training workdir (its best/, else its draft/), or a folder
        or hub id in a third-party layout, recognised by its config.json and tensor names.
    allow_base_mismatch: use it even if it was trained for another base of the same widths.
    rope_theta: rotary base for a third-party layout that does not store it.
    Raises UserError naming the part that is missing, broken or does not fit.
    """
    head = open_head(
        str(source), base, rope_theta=rope_theta, allow_base_mismatch=allow_base_mismatch
    )
    return read_draft(head, dtype)


def read_draft(head: StoredHead, dtype: jnp.dtype) -> Draft:
    """Read the params of an opened head, cast to `dtype`, on the default device."""
    # Leaf by leaf, so that the host holds one at a time.
    card, place = head.card, place_as(dtype)
    params = unflatten_dict({path: place(path, head.read(path)) for path in head.shapes})
    built = registry.head(card.config)
    return Draft(built, params, card.tree, card.provenance, head.source, card.chat_template)
