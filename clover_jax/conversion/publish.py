"""A converted head as a repository of the hub: its card, and the upload when it is asked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clover_jax.errors import UserError, reason_of
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.storage.files import write_text

CARD_FILE = "README.md"
_UNKNOWN = "not recorded"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(folder: Path, head: StoredHead, to: str, base: BaseModel, name: str) -> None:
    """Write the model card: what it is, its base, data and figures, and how to load it.

    name: of the repository, for the commands that the card shows.
    """
    config, trained, facts = head.config, head.card.base, head.card.provenance
    flags = facts.get("flags") or {}
    rows = {
        "drafter": config.kind,
        "layout": to,
        "base": base.source,
        "base's lm_head (SHA-256)": trained.lm_head,
        "base's tokenizer (SHA-256)": trained.tokenizer or _UNKNOWN,
        "data": flags.get("data") or _UNKNOWN,
        "data (SHA-256)": facts.get("data_hash") or _UNKNOWN,
        "steps": facts.get("steps") or _UNKNOWN,
        "tau": facts.get("tau") or _UNKNOWN,
        "tree": head.card.tree or _UNKNOWN,
        "dtype": head.dtype,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    write_text(
        folder / CARD_FILE,
        f"---\nlibrary_name: clover_jax\ntags:\n- speculative-decoding\n- {config.kind}\n---\n\n"
        f"# {name}\n\nA {config.kind} draft head for speculative decoding. It proposes tokens; the "
        "base verifies them, so the text is the base's own.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "tau is emitted tokens per forward of the base, as measured where the head was trained.\n\n"
        f"## Load\n\n    python -m clover_jax.generate --base={base.source} --draft={name}\n",
    )


def check_repository(name: str) -> None:
    """Raise UserError for what cannot be a repository of the hub."""
    if not _REPOSITORY.fullmatch(name):
        raise UserError(f"--push={name} is no repository of the hub; give OWNER/NAME")


def read_token(repository: str) -> str:
    """Return the hub's token; raises UserError where the environment has none."""
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UserError(
            f"--push={repository} needs a token in the environment's HF_TOKEN; set it, or prepare "
            "the folder with --card_only"
        )
    return token


def upload(folder: Path, repository: str) -> str:
    """Upload a folder to a repository of the hub, made if it is not there; return its address.

    The token is that of the environment (HF_TOKEN). Raises UserError where the hub refuses or
    cannot be reached; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=read_token(repository))
    try:
        api.create_repo(repository, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{repository} cannot be written on the hub ({reason}); {folder} is ready, "
            "upload it by hand or repeat the command with --overwrite"
        ) from error
