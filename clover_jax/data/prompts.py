"""Prompt rows: what a user may write into a prompts file, read and checked before anything runs."""

import codecs
import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clover_jax.data.prompt_fields import ROW_FIELDS
from clover_jax.data.text import is_text
from clover_jax.errors import UserError

_FORMS = ("prompt", "question", "prompt_ids", "messages", "turns")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a prompts file.

    Exactly one of text, prompt_ids, messages and turns is set, but for turns that follow messages
    (a system's). `text` and `prompt_ids` are
    continued as they are; `messages` and `turns` are a conversation, put through the chat template.

    Attributes:
      index: the row's place in the input, from 0.
      source: where it was written, for messages to the user: "prompts.jsonl:3".
      text: what to continue.
      prompt_ids: token ids to continue.
      messages: ({"role", "content"}, ...), the last not from the assistant.
      turns: what the user says, one turn after the other; each answer enters the context.
      seed, temperature, top_k, top_p, max_new_tokens: None where the command's own value holds.
      stop: strings that end the text, None where the command's own hold.
      category: the row's group in reports.
    """

    index: int
    source: str
    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    turns: tuple[str, ...] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    category: str | None = None

    @property
    def num_turns(self) -> int:
        """How many answers the row asks for."""
        return 1 if self.turns is None else len(self.turns)

    @property
    def is_conversation(self) -> bool:
        """Whether a chat template applies."""
        return self.messages is not None or self.turns is not None


@dataclasses.dataclass(frozen=True)
class BadPrompt:
    """A row that cannot be read; `error` says what is wrong with it, its source included."""

    index: int
    source: str
    error: str


def text_prompt(text: str, source: str = "--prompt") -> Prompt:
    """Return the row of a prompt that was given as text, on the command line for example."""
    return parse_prompt({"prompt": text}, index=0, source=source)


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Read every row of a .jsonl or .jsonl.gz file; empty lines are skipped.

    Raises:
      UserError: naming file, line, what is wrong and what would be right.
      OSError: for a file that cannot be opened.
    """
    rows = read_prompts_and_mistakes(path)
    for row in rows:
        if isinstance(row, BadPrompt):
            raise UserError(row.error)
    return rows


def read_prompts_and_mistakes(path: str | os.PathLike) -> list[Prompt | BadPrompt]:
    """Read every row as `read_prompts` does, with a BadPrompt in the place of a row that is wrong.

    Raises as `read_prompts` does for a file that cannot be read at all or holds no rows.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read().removeprefix(codecs.BOM_UTF8)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from None
    if path.suffix == ".json" and content.lstrip().startswith(b"["):
        raise UserError(f"{path}: a JSON list; prompts need a .jsonl file, one object a line")
    rows = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(_read_row(line, len(rows), f"{path}:{number}"))
    if not rows:
        raise UserError(f'{path}: no rows; expected one a line, such as {{"prompt": "Once upon"}}')
    return rows


def _read_row(line: bytes, index: int, source: str) -> Prompt | BadPrompt:
    try:
        return parse_prompt(_parse_line(line, source), index, source)
    except UserError as error:
        return BadPrompt(index, source, str(error))


def parse_prompt(row: Any, index: int, source: str) -> Prompt:
    """Check one row and return it; keys that mean nothing here are ignored.

    Raises:
      UserError: naming `source`, what is wrong and what would be right.
    """
    if not isinstance(row, dict):
        raise UserError(f"{source}: expected an object, found {_shown(row)}")
    forms = [form for form in _FORMS if row.get(form) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise UserError(f"{source}: expected one of {', '.join(_FORMS)}; found {found}")
    values: dict[str, Any] = {}
    for key, field in ROW_FIELDS.items():
        value = row.get(key)
        if value is None:
            continue
        if not field.is_right(value):
            raise UserError(f"{source}: {key} must be {field.wanted}, not {_shown(value)}")
        values[field.attribute] = field.convert(value)
    return Prompt(index=index, source=source, **values)


def prompts_hash(prompts: Sequence[Prompt | BadPrompt]) -> str:
    """Return a hash of what is asked for, the same wherever the rows were written."""
    rows = [dataclasses.asdict(prompt) | {"source": None} for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        if isinstance(prompt, BadPrompt):
            row["error"] = prompt.error.removeprefix(prompt.source)
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _parse_line(line: bytes, source: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error})") from None
    except RecursionError:
        raise UserError(f"{source}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise UserError(f"{source}: not JSON ({error}); expected one object a line") from None


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    if not is_text(shown):
        return f"{_shortened(json.dumps(value, default=repr))}, which holds half a character"
    return _shortened(shown)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
