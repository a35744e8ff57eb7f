"""Find the folder that a user names: a path, a built-in base, or a repository of the hub."""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from clover_jax.errors import UserError, reason_of

BUILTIN = "builtin:"
MODEL_CARD = "README.md"  # it names the license
# Only files that are read: many repositories hold the same weights again in other formats.
HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
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
    MODEL_CARD,
)
# Fetched where a repository has no other weights: bases often hold the same ones in both forms.
TORCH_PATTERNS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def find_directory(source: str) -> Path:
    """Return the folder of `builtin:NAME`, of a local path, or of a hub id `OWNER/NAME[@REVISION]`.

    A local folder wins over a hub id of the same name. Raises UserError when there is none.
    """
    if source.startswith(BUILTIN):
        name = source.removeprefix(BUILTIN)
        path = Path(str(importlib.resources.files("clover_jax") / "assets" / name))
        # The pattern keeps a name from leading out of the assets.
        if not re.fullmatch(r"\w+", name) or not (path / "config.json").is_file():
            raise UserError(
                f"there is no built-in base {name!r}; the built-in base is builtin:tiny"
            )
        return path

    # A folder wins: its name never reaches the network.
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{source} is a file; pass the folder that holds config.json")
    if _HUB_ID.fullmatch(source):
        return _download(source)
    raise UserError(
        f"{source!r} is neither a folder, nor a hub id like owner/name, nor builtin:tiny"
    )


def _download(source: str) -> Path:
    # Imported here: it is slow, and most runs need no network.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, RevisionResolutionError

    repository, _, revision = source.partition("@")

    def fetch(patterns: tuple[str, ...]) -> Path:
        # The token is from the environment, never from a file that another program left.
        token = os.environ.get("HF_TOKEN") or False
        found = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), token=token
        )
        return Path(found)

    # Two rounds: PyTorch's copies of the weights are fetched only where there are no others.
    try:
        folder = fetch(HUB_PATTERNS)
        found = any(folder.glob("*.safetensors")) or any(folder.glob("**/draft.json"))
        return folder if found else fetch(HUB_PATTERNS + TORCH_PATTERNS)
    # OSError: no connection, or a full disk.
    except (OSError, HTTPError, HFValidationError, RevisionResolutionError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{source!r} is not a local folder and cannot be fetched from the hub ({reason}); "
            "to work offline, pass a folder that holds its config.json, tokenizer and weights, or "
            "set HF_HUB_OFFLINE=1 where the hub's cache has it"
        ) from error
