"""Chat templates for bases that come without one, or with an unsuitable one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import clover_jax
from clover_jax.data.records import Conversation, Record
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(clover_jax.__file__).parent / "assets" / "templates"


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase | None, name: str | None
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer with the named template: a file, or one of `assets/templates`.

    None leaves it as it is. Raises UserError for a template that does not exist.
    """
    if name is None:
        return tokenizer
    if tokenizer is None:
        raise UserError(f"--chat_template={name}: the base has no tokenizer files to use it with")
    tokenizer.chat_template = _find(name).read_text(encoding="utf-8").strip("\n")
    return tokenizer


def template_notice(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase | None
) -> str | None:
    """Return what to tell a user whose conversations meet a base without a chat template."""
    count = sum(isinstance(record, Conversation) for record in records)
    if not count or tokenizer is None or tokenizer.chat_template is not None:
        return None
    return (
        f"the base has no chat template: messages of {count} conversations are joined by newlines, "
        "and nothing says who speaks; --chat_template=FILE gives one"
    )


def _find(name: str) -> Path:
    shipped = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise UserError(
            f"--chat_template={name}: no such file, and none of {', '.join(shipped)}, which come "
            "with this program"
        )
    return path
