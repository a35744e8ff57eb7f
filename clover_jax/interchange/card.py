"""draft.json, which makes a folder a native draft directory.

It holds the format's version, the drafter's config, its tree, the fingerprint of its base,
provenance, and the hashes of the files of `params/` (orbax).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from clover_jax.config import DrafterConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.pretrained.fingerprint import BaseFingerprint
from clover_jax.storage.json_files import read_json_object

FORMAT_VERSION = 1
CARD = "draft.json"
PARAMS = "params"


@dataclasses.dataclass(frozen=True)
class Card:
    """The content of draft.json.

    base: the fingerprint of the base that the head was trained for.
    tree: the name of the tree that it was measured with.
    provenance: how it was made, as its writer recorded it.
    files: SHA-256 of each file of params/, as the writer left them.
    chat_template: text of the template used in training.
    """

    config: DrafterConfig
    base: BaseFingerprint
    tree: str | None
    provenance: dict[str, Any]
    # Any type, since a card may have been edited by hand: `check_folder` judges it.
    files: Any = None
    chat_template: str | None = None


def native_directory(directory: Path) -> Path | None:
    """Return the native draft directory in a folder that is one or a workdir; None without."""
    # Of a workdir its best head wins over its last.
    candidates = (directory, directory / "best", directory / "draft")
    return next((path for path in candidates if (path / CARD).is_file()), None)


def write_card(directory: Path, card: Card) -> None:
    """Write draft.json."""
    # The folder is moved to its place when complete, so no reader meets a torn file.
    fields = {
        "format_version": FORMAT_VERSION,
        "drafter": card.config.to_dict(),
        "tree": card.tree,
        "base": card.base.to_dict(),
        "chat_template": card.chat_template,
        "provenance": card.provenance,
        "files": card.files,
    }
    text = json.dumps(fields, indent=2) + "\n"
    (directory / CARD).write_text(text, encoding="utf-8")


def read_card(directory: Path) -> Card:
    """Read draft.json.

    Raises UserError for what is missing, broken or of another version.
    """
    path = directory / CARD
    card = read_json_object(path)
    # The version comes first: fields of another version mean nothing here.
    version = card.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {version!r}; this program reads {FORMAT_VERSION}"
        )

    # All of it may have been edited by hand, so every value is suspect.
    missing = [name for name in ("drafter", "base") if not isinstance(card.get(name), dict)]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r} object")
    try:
        config = registry.config_from_dict(card["drafter"])
        # A null passes the dataclass, and would fail far from here.
        if config.layer is None:
            raise ValueError("its drafter has no layer")
        trained_for = BaseFingerprint.from_dict(card["base"])
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error

    # Drafts of earlier versions lack some of these fields.
    provenance = card.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise UserError(f"{path}: provenance must be an object or null")
    # Flags are asked later for the template and the data, and a model card formats tau.
    flags, tau = provenance.get("flags"), provenance.get("tau")
    if not isinstance(flags, dict | None):
        raise UserError(f"{path}: flags of provenance must be an object or null, not {flags!r}")
    if not isinstance(tau, float | int | None):
        raise UserError(f"{path}: tau of provenance must be a number or null, not {tau!r}")
    texts = {name: card.get(name) for name in ("tree", "chat_template")}
    for name in ("data", "chat_template"):
        texts[f"{name} of provenance's flags"] = (flags or {}).get(name)
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise UserError(f"{path}: {name} must be a text or null, not {value!r}")
    tree, template = card.get("tree"), card.get("chat_template")
    return Card(config, trained_for, tree, provenance, card.get("files"), template)
