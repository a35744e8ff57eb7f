"""Draft directories: our own, written whole, and those of others, read.

A native draft directory holds `draft.json` (format version, the drafter's config, its tree, the
fingerprint of its base, provenance, hashes of the files) and `params/` (orbax).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.config import DrafterConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError, reason_of
from clover_jax.interchange.layouts import LAYOUTS
from clover_jax.interchange.params_folder import restore_params, save_params
from clover_jax.interchange.read_head import read_head
from clover_jax.interchange.recognise import recognise
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.fingerprint import BaseFingerprint, differences, fingerprint
from clover_jax.pretrained.sources import find_directory
from clover_jax.storage.files import atomic_directory
from clover_jax.storage.json_files import read_json_object

FORMAT_VERSION = 1
CARD = "draft.json"
PARAMS = "params"


@dataclasses.dataclass(frozen=True)
class Draft:
    """A loaded draft.

    head: module and config.
    params: the head's params.
    tree: the name of the tree it was measured with, or None.
    provenance: how it was made, as its writer recorded it.
    source: what the user asked for.
    chat_template: the text of the one it was trained with; None where there was none, or it is not
        known.
    """

    head: registry.DraftHead
    params: Params = dataclasses.field(repr=False)
    tree: str | None
    provenance: dict[str, Any]
    source: str
    chat_template: str | None = None


@dataclasses.dataclass(frozen=True)
class Card:
    """What draft.json says.

    base: the fingerprint of the base that the head was trained for.
    files: SHA-256 of each file of params/, as the writer left them.
    chat_template: the text of the one in use in training.
    """

    config: DrafterConfig
    base: BaseFingerprint
    tree: str | None
    provenance: dict[str, Any]
    files: Any = None
    chat_template: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what draft.json holds."""
        return {
            "format_version": FORMAT_VERSION,
            "drafter": self.config.to_dict(),
            "tree": self.tree,
            "base": self.base.to_dict(),
            "chat_template": self.chat_template,
            "provenance": self.provenance,
            "files": self.files,
        }


def save_draft(
    directory: Path,
    config: DrafterConfig,
    params: Params,
    tree: str | None,
    base: BaseFingerprint,
    provenance: dict[str, Any],
    chat_template: str | None = None,
) -> None:
    """Write a native draft directory; what was there stays until the new one is whole.

    provenance: anything JSON can hold: flags, versions, git revision, data hash, steps, tau.
    chat_template: the text of the one it was trained with.
    """
    with atomic_directory(directory) as unfinished:
        files = save_params(unfinished / PARAMS, params)
        write_card(unfinished, Card(config, base, tree, provenance, files, chat_template))


def write_card(directory: Path, card: Card) -> None:
    """Write draft.json."""
    text = json.dumps(card.to_dict(), indent=2) + "\n"
    (directory / CARD).write_text(text, encoding="utf-8")


def load_draft(
    source: str | Path,
    base: BaseModel,
    dtype: jnp.dtype = jnp.float32,
    allow_base_mismatch: bool = False,
    rope_theta: float | None = None,
) -> Draft:
    """Load a draft for a base.

    source: a native draft directory, a training workdir (its best/, else its draft/), or a folder
        or hub id in an official layout, recognised by its config.json and tensor names.
    allow_base_mismatch: use it even if it was trained for another base of the same widths.
    rope_theta: rotary base for a foreign layout that does not say it.
    Raises UserError naming whatever is missing, broken or does not fit.
    """
    found = find_head(str(source), rope_theta)
    if found.layout is None:
        return _load_native(found.directory, str(source), base, dtype, allow_base_mismatch)
    config, params = read_head(
        LAYOUTS[found.layout], found.directory, base, dtype, rope_theta, allow_base_mismatch
    )
    return Draft(registry.head(config), params, None, {"layout": found.layout}, str(source))


class FoundHead(NamedTuple):
    """Where a head lies; layout None is a native draft directory, else the name of another's."""

    directory: Path
    layout: str | None


def find_head(source: str, rope_theta: float | None = None) -> FoundHead:
    """Find what a name stands for; the arguments are those of `load_draft`.

    Raises UserError where there is no head, or one that says its own rotary base.
    """
    directory = find_directory(source)
    native = native_directory(directory)
    if native is None:
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} is no draft: it has neither {CARD} (a draft directory), nor "
                f"best/{CARD} or draft/{CARD} (a training workdir), nor config.json (others' "
                "layouts)"
            )
        return FoundHead(directory, recognise(directory))
    if rope_theta is not None:
        raise UserError(
            f"{native} says its own rotary base; a rope theta ({rope_theta:g}) can be given for "
            "the layouts of others only"
        )
    return FoundHead(native, None)


def native_directory(directory: Path) -> Path | None:
    """Return the native draft directory in a folder that is one or a workdir; None without."""
    candidates = (directory, directory / "best", directory / "draft")
    return next((path for path in candidates if (path / CARD).is_file()), None)


def _load_native(
    directory: Path, source: str, base: BaseModel, dtype: jnp.dtype, allow_base_mismatch: bool
) -> Draft:
    card = read_card(directory)
    check_base(card, base, source, allow_base_mismatch)
    head = registry.head(card.config)
    expected = expected_params(card, directory, base.params)
    _check_layers(card.config.features, base, source)
    params = restore_params(directory / PARAMS, expected, dtype, card.files)
    return Draft(head, params, card.tree, card.provenance, source, card.chat_template)


def read_card(directory: Path) -> Card:
    """Read draft.json.

    Raises UserError for what is missing, broken or of another version.
    """
    path = directory / CARD
    card = read_json_object(path)
    version = card.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {version!r}; this program reads {FORMAT_VERSION}"
        )
    missing = [name for name in ("drafter", "base") if not isinstance(card.get(name), dict)]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r} object")
    try:
        config = registry.config_from_dict(card["drafter"])
        if config.layer is None:
            raise ValueError("its drafter has no layer")
        trained_for = BaseFingerprint.from_dict(card["base"])
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(card.get("provenance") or {}, dict):
        raise UserError(f"{path}: provenance must be an object or null")
    template = card.get("chat_template")  # of drafts before it was recorded: None
    if not isinstance(template, str | None):
        raise UserError(f"{path}: chat_template must be a text or null, not {template!r}")
    return Card(
        config,
        trained_for,
        card.get("tree"),
        card.get("provenance") or {},
        card.get("files"),
        template,
    )


def expected_params(card: Card, directory: Path, base_params: Params) -> Params:
    """Return the shapes of the params that draft.json asks for.

    Raises UserError for a config with values that no head can be built of.
    """
    try:
        return registry.init_shapes(registry.head(card.config), base_params)
    except (TypeError, ValueError, AttributeError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{directory / CARD}: no head can be built of its drafter ({reason}); was it edited?"
        ) from error


def check_base(card: Card, base: BaseModel, source: str, allow_base_mismatch: bool) -> None:
    """Raise UserError where a draft was trained for another base.

    allow_base_mismatch: let it pass where at least the widths are the same.
    """
    config, trained_for = card.config, card.base
    widths = {
        "vocabulary": (config.vocab_size, base.config.vocab_size),
        "width": (config.layer.hidden_size, base.config.hidden_size),
    }
    for name, (ours, theirs) in widths.items():
        if ours != theirs:
            raise UserError(
                f"draft {source} has {name} {ours}, but base {base.source} has {theirs}; "
                "give the base that it was trained for"
            )
    found = {} if allow_base_mismatch else differences(trained_for, fingerprint(base))
    if found:
        listed = ", ".join(
            f"{name} {_short(a)} against {_short(b)}" for name, (a, b) in found.items()
        )
        raise UserError(
            f"draft {source} was trained for another base than {base.source}: {listed}; give the "
            "base that it was trained for, or --allow_base_mismatch"
        )


def _check_layers(features: tuple[str, ...], base: BaseModel, source: str) -> None:
    """Raise UserError where a head reads a state that the base has not."""
    numbers = [name.removeprefix("layer_") for name in features if name.startswith("layer_")]
    deepest = max(map(int, numbers), default=0)
    if deepest >= base.config.num_layers:
        raise UserError(
            f"draft {source} reads the state that enters layer {deepest}, but base {base.source} "
            f"has {base.config.num_layers} layers; give the base that it was trained for"
        )


def _short(value: Any) -> str:
    """Return enough of a hash to tell it from another."""
    return str(value)[:12]
