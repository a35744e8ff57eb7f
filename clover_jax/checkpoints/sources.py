"""Find the folder that a user names: a path, a built-in base, or a repository of the hub."""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from clover_jax.checkpoints.gguf_file import gguf_folder
from clover_jax.errors import UserError, reason_of

BUILTIN = "builtin:"
# Only files that are read: many repositories hold the same weights again in other formats.
HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors-*.safetensors",  # as Qwen3.5 is published
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "draft.json",
    "params/*",
    "best/*",  # of a training workdir; a star stands for folders too
    "draft/*",
    "medusa_lm_head.*",
)
# Fetched where a repository has no other weights: bases often hold the same ones in both forms.
TORCH_PATTERNS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def find_directory(source: str) -> Path:
    """Return the folder of `builtin:NAME`, of a local path, or of a hub id `OWNER/NAME[@REVISION]`.

    A GGUF file has a folder in the user's cache. A local folder wins. A value that looks like a
    path is never looked up on the hub.
    """
    if source.startswith(BUILTIN):
        name = source.removeprefix(BUILTIN)
        path = Path(str(importlib.resources.files("clover_jax") / "assets" / name))
        # The pattern keeps a name from leading out of the assets.
        if not re.fullmatch(r"\w+", name) or not (path / "config.json").is_file():
            raise UserError(f"unknown built-in base {name!r}; the built-in base is builtin:tiny")
        return path

    # A folder wins: its name never reaches the network.
    path = Path(source).expanduser()
    if path.is_dir():
        # A reader of a pipe or the like would wait for ever.
        for part in path.iterdir():
            if part.exists() and not (part.is_file() or part.is_dir()):
                raise UserError(f"{part} is neither a file nor a folder; move it elsewhere")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return gguf_folder(path)
    if path.exists():
        raise UserError(f"{source} is a file; pass the folder that holds config.json")

    # owner/name, where no folder `owner` exists, may be a repository; other slashes make a path.
    name = source.partition("@")[0]
    if source.startswith((".", "/", "~")) or name.count("/") > 1 or Path(path.parts[0]).is_dir():
        raise UserError(f"the folder {source} does not exist{_close_names(path)}")
    if _HUB_ID.fullmatch(source):
        return _download(source)
    raise UserError(
        f"{source!r} is neither a folder{_close_names(path)}, nor a hub id like owner/name, nor "
        "builtin:tiny"
    )


def found_below(directory: Path, names: Sequence[str]) -> str:
    """Return "; one lies in DIR: pass that folder" where a file lies below, else "".

    So it does in what a trainer leaves, in a model's folder of the hub's cache, and in the cache.
    """
    places = ("*", "*/*", "models--*/snapshots/*")
    patterns = [f"{place}/{name}" for place in places for name in names]
    found = (path.parent for pattern in patterns for path in sorted(directory.glob(pattern)))
    folders = list(dict.fromkeys(itertools.islice(found, 3)))
    if not folders:
        return ""
    return f"; one lies in {', '.join(map(str, folders))}: pass that folder"


def _close_names(path: Path) -> str:
    """Return " (close names: ...)" with existing folders of names like a missing one, or ""."""
    # The first missing part of the path is compared with the folders next to it.
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    try:
        siblings = [folder.name for folder in missing.parent.iterdir() if folder.is_dir()]
    except OSError:  # a file, or a folder that may not be read
        return ""
    close = difflib.get_close_matches(missing.name, siblings)
    rest = path.relative_to(missing)
    # The rest of the path may exist in them.
    found = [missing.parent / name for name in close]
    found = [folder / rest if (folder / rest).is_dir() else folder for folder in found]
    return f" (close names: {', '.join(map(str, found))})" if found else ""


def _download(source: str) -> Path:
    # Imported here: it is slow, and most runs need no network.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RevisionResolutionError,
    )

    repository, _, revision = source.partition("@")

    def fetch(patterns: tuple[str, ...]) -> Path:
        # The token is from the environment, never from a file that another program left.
        token = os.environ.get("HF_TOKEN") or False
        found = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), token=token
        )
        return Path(found)

    # Two rounds: PyTorch's copies of the weights are fetched only where others are missing.
    try:
        folder = fetch(HUB_PATTERNS)
        found = any(folder.glob("*.safetensors")) or any(folder.glob("**/draft.json"))
        return folder if found else fetch(HUB_PATTERNS + TORCH_PATTERNS)
    # OSError: no connection, or a full disk.
    except (OSError, HTTPError, HFValidationError, RevisionResolutionError) as error:
        reason = reason_of(error)
        if isinstance(error, LocalEntryNotFoundError):
            reason = "the hub cannot be reached and its cache has no copy"
        raise UserError(
            f"the folder {source} does not exist{_close_names(Path(source))}, and no repository of "
            f"this name can be fetched from the hub ({reason})"
        ) from error
