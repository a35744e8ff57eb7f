"""A converted head as a repository of the hub: its card, and the upload when it is asked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clover_jax.errors import UserError, reason_of
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.sources import MODEL_CARD
from clover_jax.storage.files import write_text

_UNKNOWN = "not recorded"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(folder: Path, head: StoredHead, to: str, base_model: str, terms: str, name: str):
    """Write the model card: drafter, base, data, figures, and a command that loads the head.

    base_model: the name by which others load the base. terms: the license.
    name: of the repository.
    """
    # The facts come from draft.json; those of a head in another layout are mostly unknown.
    config, trained, facts = head.config, head.card.base, head.card.provenance
    flags, tau = facts.get("flags") or {}, facts.get("tau")
    rows = {
        "drafter": config.kind,
        "layout": to,
        "base": base_model,
        "base's lm_head (SHA-256)": trained.lm_head,
        "base's tokenizer (SHA-256)": trained.tokenizer or _UNKNOWN,
        # Names without folders, which are of one machine only.
        "data": ", ".join(Path(part).name for part in (flags.get("data") or _UNKNOWN).split(",")),
        "data (SHA-256)": facts.get("data_hash") or _UNKNOWN,
        "steps": facts.get("steps") or _UNKNOWN,
        "tau": f"{tau:.2f}" if tau else _UNKNOWN,
        "tree": head.card.tree or _UNKNOWN,
        "dtype": head.dtype,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())

    # The hub reads the fields between the dashes; base_model must be a repository there.
    fields = ["library_name: clover_jax", "pipeline_tag: text-generation", f"license: {terms}"]
    if _REPOSITORY.fullmatch(base_model):
        fields.append(f"base_model: {base_model}")
    fields += ["tags:", "- speculative-decoding", f"- {config.kind}"]
    front = "\n".join(fields)
    write_text(
        folder / MODEL_CARD,
        f"---\n{front}\n---\n\n# {name}\n\n"
        f"A {config.kind} draft head for speculative decoding. It proposes tokens; the base "
        f"verifies them, so the text is the base's own.\n\n| | |\n| --- | --- |\n{table}\n\n"
        "tau is emitted tokens per forward of the base, as measured where the head was trained.\n\n"
        f"## Load\n\n    python -m clover_jax.generate --base={base_model} --draft={name} "
        '--prompt="Once upon a time"\n',
    )


def public_name(base: BaseModel, given: str | None) -> str:
    """Return the name by which others load a base: `--base_model`, else `--base`.

    Raises UserError where neither is a name that others can use.
    """
    if given is not None and not _REPOSITORY.fullmatch(given):
        raise UserError(f"--base_model={given} is no repository of the hub; give OWNER/NAME")
    # A hub id or a built-in base has the same name everywhere.
    if given is None and Path(base.source).expanduser().is_dir():
        raise UserError(
            f"--base={base.source} is a folder that only this machine has, and the card must say "
            "which base the head is for; give --base_model=OWNER/NAME"
        )
    return given or base.source


def license_of(base: BaseModel, given: str | None) -> str:
    """Return the license of a head: `--license`, else the one of its base's card.

    Raises UserError where there is neither.
    """
    # The fields of a card stand between two lines of dashes at its beginning.
    card = base.directory / MODEL_CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""
    own = re.search(r"^license: *(\S+)", front, re.MULTILINE)
    named = given or (own[1] if own else None)
    if named is None:
        raise UserError(
            f"the card must name a license, and {card} has none; give --license, such as "
            "--license=apache-2.0"
        )
    return named


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
    # Imported here: it is slow, and most conversions upload nothing.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=read_token(repository))
    try:
        # In an existing repository the upload is one more commit.
        api.create_repo(repository, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{repository} cannot be written on the hub ({reason}); {folder} is ready, "
            "upload it by hand or repeat the command with --overwrite"
        ) from error
