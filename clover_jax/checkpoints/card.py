"""The native draft directory: draft.json (the card) and params/, an orbax folder.

The card holds the format's version, the drafter's config, its tree, the fingerprint of its base,
provenance, and the hashes of the files of params/, which is read leaf by leaf.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from clover_jax.array_types import LeafPath, Params
from clover_jax.checkpoints.base import BaseFingerprint
from clover_jax.config import DrafterConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.runtime.files import atomic_directory, hash_files, read_json_object
from clover_jax.runtime.progress import say

FORMAT_VERSION = 1
CARD = "draft.json"
PARAMS = "params"


@dataclasses.dataclass(frozen=True)
class Card:
    """The content of draft.json: how a head was made, for which base, and with which tree measured.

    files: SHA-256 of each file of params/. chat_template: text of the template used in training.
    """

    config: DrafterConfig
    base: BaseFingerprint
    tree: str | None
    provenance: dict[str, Any]
    # Any type, since a card may have been edited by hand; `check_params` checks it.
    files: Any = None
    chat_template: str | None = None


def native_directory(directory: Path) -> Path | None:
    """Return the native draft directory in a folder that is one or a workdir, or None."""
    # In a workdir, the best head wins over the last one.
    candidates = (directory, directory / "best", directory / "draft")
    return next((path for path in candidates if (path / CARD).is_file()), None)


def write_native(directory: Path, card: Card, params: Params) -> None:
    """Write a native draft directory, with `card.files` filled in; until then the old one stays."""
    with atomic_directory(directory) as unfinished:
        files = save_params(unfinished / PARAMS, params)
        # The card comes last, because it lists the hashes of the other files.
        fields = {
            "format_version": FORMAT_VERSION,
            "drafter": card.config.to_dict(),
            "tree": card.tree,
            "base": card.base.to_dict(),
            "chat_template": card.chat_template,
            "provenance": card.provenance,
            "files": files,
        }
        text = json.dumps(fields, indent=2) + "\n"
        (unfinished / CARD).write_text(text, encoding="utf-8")


def save_params(folder: Path, params: Params) -> dict[str, str]:
    """Write params to a new folder; return relative file name -> SHA-256 of each file.

    Orbax detects lost files, but not every altered byte, so the hashes are needed.
    """
    # One process may write while others do not, so it must not wait for them.
    several = jax.process_count() > 1
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()} if several else None,
        # A prefix of its own keeps its barriers apart from the training checkpoints'.
        barrier_sync_key_prefix="draft" if several else None,
    )
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder.absolute(), params)
    return hash_files(folder)


def read_card(directory: Path) -> Card:
    """Read draft.json; raises UserError for a missing, broken or unknown version of it."""
    path = directory / CARD
    card = read_json_object(path)
    # The version comes first: fields of another version may have other meanings.
    version = card.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {version!r}; this program reads {FORMAT_VERSION}"
        )

    known = {"format_version", "drafter", *(field.name for field in dataclasses.fields(Card)[1:])}
    if unknown := sorted(card.keys() - known):
        say(f"{path}: {len(unknown)} fields not read, unknown here: {', '.join(unknown)}")
    # The file may have been edited by hand, so every value is checked.
    missing = [name for name in ("drafter", "base") if not isinstance(card.get(name), dict)]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r} object")
    try:
        config = registry.config_from_dict(card["drafter"])
        # The dataclass accepts null, which would fail far from here.
        if config.layer is None:
            raise ValueError("its drafter has no layer")
        trained_for = BaseFingerprint.from_dict(card["base"])
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error

    # Drafts of earlier versions lack some of these fields.
    provenance = card.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise UserError(f"{path}: provenance must be an object or null")
    flags, tree, template = provenance.get("flags"), card.get("tree"), card.get("chat_template")
    if not isinstance(flags, dict | None):
        raise UserError(f"{path}: flags of provenance must be an object or null, not {flags!r}")
    # Loading compares the template and names the flag that it came from.
    flag = (flags or {}).get("chat_template")
    texts = {"tree": tree, "chat_template": template, "chat_template of provenance's flags": flag}
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise UserError(f"{path}: {name} must be a string or null, not {value!r}")
    return Card(config, trained_for, tree, provenance, card.get("files"), template)


def check_params(folder: Path, expected: Params, files: Any) -> dict[LeafPath, Any]:
    """Return the shape and dtype of each stored leaf by its path, reading no values.

    expected: the ShapeDtypeStructs that the config asks for. files: the card's hashes.
    Raises UserError naming a file or a tensor that is missing or altered, or an extra tensor.
    """
    # Hashes first: orbax fails in many ways on an altered file.
    if not isinstance(files, dict) or not files:
        raise UserError(f"{folder.parent}/draft.json does not list the files of {folder.name}/")
    hashes = hash_files(folder)
    for name, recorded in files.items():
        if name not in hashes:
            raise UserError(f"{folder / name} is missing; was the draft copied whole?")
        if hashes[name] != recorded:
            raise UserError(f"{folder / name} has changed since it was written; copy it again")
    if extra := sorted(hashes.keys() - files.keys()):
        say(f"{folder}: {len(extra)} files not read, unknown to {CARD}: {', '.join(extra[:3])}")

    # Then the tensors, by name and shape. A type may differ: heads are cast as they are loaded.
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
    if metadata is None:
        raise UserError(f"{folder} holds no params that orbax can read")
    stored, asked = by_path(metadata.tree), by_path(expected)
    for path, wanted in asked.items():
        name = "/".join(path)
        if path not in stored:
            raise UserError(f"{folder} lacks tensor {name}, which its draft.json asks for")
        shape = tuple(stored[path].shape)
        if shape != wanted.shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {shape}; draft.json asks for {wanted.shape}"
            )
    # An extra tensor may be a part of the head that this program would leave out.
    for path in stored:
        if path not in asked:
            raise UserError(
                f"{folder} has tensor {'/'.join(path)}, which its draft.json does not ask for"
            )
    return stored


def by_path(tree: Params) -> dict[LeafPath, Any]:
    """Return the leaves of nested dictionaries by their keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def read_leaf(folder: Path, path: LeafPath) -> np.ndarray:
    """Return one leaf as it is stored."""
    # A tree with this leaf alone, so that no other is read.
    item = unflatten_dict({path: 0})
    # Without these types orbax would put the leaf where it was when it was written.
    wanted = unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=wanted, partial_restore=True)
        restored: Any = checkpointer.restore(folder.absolute(), args=arguments)
    return by_path(restored)[path]
