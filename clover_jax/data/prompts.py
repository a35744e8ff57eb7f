"""Prompt rows: what a user may write into a prompts file, read and checked before anything runs."""

from __future__ import annotations

import codecs
import collections
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.data.forms import keys_with, read_asked, read_messages, read_system, read_variables
from clover_jax.data.records import (
    STANDARD_INPUT,
    Message,
    is_text,
    json_hash,
    open_rows,
    parse_line,
    plain_name,
    shown,
    tell_unread,
)
from clover_jax.data.row_files import TABLES, check_readable, table_rows
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

SHIPPED_PROMPTS = "prompts.jsonl"  # in a base's folder
_FORMS = ("prompt", "question", "prompt_ids", "messages", "conversations", "instruction", "turns")
_MESSAGES = ("messages", "conversations")
_CONVERSATIONS = (*_MESSAGES, "question", "instruction", "turns")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a prompts file.

    Exactly one of text, prompt_ids, messages and turns is set; only turns may follow messages, a
    system's. `text` and `prompt_ids` are continued as they are; `messages` and `turns` are a
    conversation, put through the chat template.

    index: the row's place in the input, from 0.
    source: where it was written, for messages to the user: "prompts.jsonl:3".
    text, prompt_ids: text or token ids to continue.
    messages: as `read_messages` returns them, the last not from the assistant.
    turns: what the user says, one turn after the other; each answer enters the context. A turn may
        also be messages, which end with the user's or a tool's.
    variables: what else the chat template may read, tools for example.
    seed, temperature, top_k, top_p, min_p, the penalties, max_new_tokens, stop, stop_token_ids:
        None where the command's own holds; the two fields after them likewise.
    min_new_tokens, logit_bias, structured_outputs: as in `row_settings.GenerationSettings`.
    category: the row's group in reports.
    prediction: a text that the answer may repeat; drafts are copied from it, no text changes.
    """

    index: int
    source: str
    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    turns: tuple[str | tuple[Message, ...], ...] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    category: str | None = None
    prediction: str | None = None
    min_new_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    structured_outputs: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Number of answers that the row asks for."""
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


def text_prompt(text: str) -> Prompt:
    """Return the row of a prompt that was given as text, on the command line for example."""
    return parse_prompt({"prompt": text}, index=0, source="--prompt")


def shipped_prompts(base: Path, instead: str) -> Path:
    """Return the prompts' file of a base; raises UserError, advising flags, where it has none."""
    path = base / SHIPPED_PROMPTS
    if not path.is_file():
        raise UserError(
            f"there is nothing to decode: {base} has no {SHIPPED_PROMPTS}; give {instead}"
        )
    return path


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Read every row of a file of rows (see data/README.md), or of standard input for "-".

    Raises UserError naming file, line, what is wrong and what would be right.
    """
    rows = []
    for row in read_prompts_and_mistakes(path):
        if isinstance(row, BadPrompt):
            raise UserError(row.error)
        rows.append(row)
    return rows


def read_prompt_files(files: str, strict: bool = False) -> list[Prompt | BadPrompt]:
    """Read the rows of "FILE,FILE", numbered through all; strict: a wrong row raises UserError."""
    read = read_prompts if strict else read_prompts_and_mistakes
    rows: list[Prompt | BadPrompt] = []
    for name in filter(None, map(str.strip, files.split(","))):
        for row in read(Path(name).expanduser()):
            rows.append(dataclasses.replace(row, index=len(rows)))
    if not rows:
        raise UserError(f"--prompts={files} names no file")
    return rows


def read_prompts_and_mistakes(path: str | os.PathLike) -> list[Prompt | BadPrompt]:
    """Read every row as `read_prompts` does, with a BadPrompt in the place of a wrong one."""
    path = Path(path)
    name = "standard input" if path == STANDARD_INPUT else str(path)
    check_readable(path)
    rows: list[Prompt | BadPrompt] = []
    unread: collections.Counter[str] = collections.Counter()
    num_answered = 0
    for index, (source, item) in enumerate(_items(path, name)):
        # A bad row keeps its place: rows of output carry the numbers of the input's.
        try:
            row = parse_line(item, source) if isinstance(item, bytes) else item
            asked = _without_answer(row, source)
            rows.append(parse_prompt(asked, index, source))
            num_answered += asked is not row
            unread.update(_unread(row))
        except UserError as error:
            rows.append(BadPrompt(index, source, str(error)))
    if not rows:
        raise UserError(f'{name}: no rows; expected one a line, such as {{"prompt": "Once upon"}}')
    tell_unread(unread, name)
    if num_answered:
        say(
            f"{name}: {num_answered} of {len(rows)} rows end with an assistant message, which is "
            "dropped and decoded again"
        )
    return rows


def _items(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (source, row) of a file, JSON as bytes."""
    if path.suffix.lower() in TABLES:
        yield from table_rows(path)
        return
    with open_rows(path) as file:
        # Some editors begin a file with a byte order mark, which the first row does not include.
        content = file.read().removeprefix(codecs.BOM_UTF8)
    # The readers of training data take a list, so it is a likely mistake.
    if plain_name(path).endswith(".json") and content.lstrip().startswith(b"["):
        raise UserError(f"{name}: a JSON list; prompts need a .jsonl file, one object a line")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"{name}:{number}", line


def _without_answer(row: Any, source: str) -> Any:
    """Return a row without the answers at its end; the same row where there are none."""
    there = [key for key in _MESSAGES if isinstance(row, dict) and row.get(key) is not None]
    key = there[0] if there else None
    if key is None:
        return row
    messages = read_messages(row[key], f"{source}: {key}").messages
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return row | {key: asked} if 0 < len(asked) < len(messages) else row


def _unread(row: Mapping[str, Any]) -> set[str]:
    """Return the keys of a row that hold something and are not read."""
    there = {key for key in row if row[key] is not None}
    form = next(form for form in _FORMS if form in there)
    more = keys_with(form) if form in _CONVERSATIONS else set()
    return there - ROW_FIELDS.keys() - {form} - more


class Failures:
    """Lines for the user on rows that are not decoded: one when a reason is new, then counts."""

    def __init__(self):
        self._rows: dict[str, set[int]] = {}
        self._first: dict[str, str] = {}

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Count a row with "error" or "skipped"; return a line for a new reason."""
        reason = row.get("error") or row.get("skipped")
        if reason is None:
            return None
        # Two rows have the same reason where only numbers and the row's own value differ.
        alike = re.sub(r"\d+", "#", reason.partition(", not ")[0])
        rows = self._rows.setdefault(alike, set())
        rows.add(row["index"])
        if alike in self._first:
            return None
        verb = "failed" if "error" in row else "skipped"
        self._first[alike] = f"{verb} for the same reason as row {row['index']}"
        return f"row {row['index']} {verb}: {reason}"

    def counts(self) -> list[str]:
        """Return a line for each reason that several rows have."""
        several = [(alike, rows) for alike, rows in self._rows.items() if len(rows) > 1]
        return [f"{len(rows)} rows {self._first[alike]}" for alike, rows in several]


def parse_prompt(row: Any, index: int, source: str) -> Prompt:
    """Check one row and return it, unknown keys ignored; raises UserError naming `source`."""
    if not isinstance(row, dict):
        raise UserError(f"{source}: expected an object, found {shown(row)}")

    # A null stands for a key that is not there, as tools that fill in columns write it.
    forms = [form for form in _FORMS if row.get(form) is not None]
    if len(forms) != 1:
        keys = " and ".join(forms) if forms else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise UserError(f"{source}: expected one of {', '.join(_FORMS)}; found {keys}")

    values: dict[str, Any] = {}
    # In the order of ROW_FIELDS: of several mistakes always the same one is named.
    for key, field in ROW_FIELDS.items():
        value = row.get(key)
        if value is None:
            continue
        if not field.is_right(value):
            raise UserError(f"{source}: {key} must be {field.wanted}, not {shown(value)}")
        values[field.attribute] = field.convert(value)

    form = forms[0]
    if form in _CONVERSATIONS:
        values["variables"] = read_variables(row, f"{source}: ")
    if form in ("question", "turns"):
        values["messages"] = read_system(row, source) or None
    elif form in _CONVERSATIONS:
        messages = values["messages"] = read_asked(row, form, source).messages
        if not messages or messages[-1]["role"] == "assistant":
            raise UserError(
                f"{source}: {form} must be messages that end with one of the user or a tool, "
                f"not {shown(row[form])}"
            )
    return Prompt(index=index, source=source, **values)


def prompts_hash(prompts: Sequence[Prompt | BadPrompt]) -> str:
    """Return a hash of what is asked for, the same wherever the rows were written."""
    # A source names a file of this machine; an error begins with it.
    rows = [dataclasses.asdict(prompt) | {"source": None} for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        # Without variables the hash is that of earlier versions.
        if not row.get("variables"):
            row.pop("variables", None)
        if isinstance(prompt, BadPrompt):
            row["error"] = prompt.error.removeprefix(prompt.source)
    return json_hash(rows)


class RowField(NamedTuple):
    """One key of a row, and the attribute of `Prompt` that it becomes.

    is_right: whether a JSON value may stand there. wanted: words that follow "must be".
    """

    attribute: str
    is_right: Callable[[Any], bool]
    wanted: str
    convert: Callable[[Any], Any]


# JSON's true is an int in Python, and its NaN a float; neither is a number here.
def _is_whole(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    # A comparison, since `math.isfinite` fails on huge integers; it is false for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_right, value))


def _whole(attribute: str, least: int) -> RowField:
    wanted = f"a whole number from {least}"
    return RowField(attribute, lambda value: _is_whole(value, least), wanted, int)


def _number(attribute: str) -> RowField:
    return RowField(attribute, _is_number, "a number", float)


def _flag(attribute: str) -> RowField:
    return RowField(attribute, lambda value: isinstance(value, bool), "true or false", bool)


ROW_FIELDS = {
    "prompt": RowField("text", is_text, "a string", str),
    # A question is a conversation of one turn.
    "question": RowField("turns", is_text, "a string", lambda value: (value,)),
    "prompt_ids": RowField(
        "prompt_ids",
        lambda value: _is_list(value, lambda id_: _is_whole(id_, 0)),
        "a list of token ids, at least one",
        tuple,
    ),
    "turns": RowField(
        "turns", lambda value: _is_list(value, is_text), "a list of strings, at least one", tuple
    ),
    "seed": _whole("seed", 0),
    # `decoding.sampling_config.SamplingParams` checks their values.
    "temperature": _number("temperature"),
    "top_k": RowField("top_k", lambda value: _is_whole(value, -math.inf), "a whole number", int),
    "top_p": _number("top_p"),
    "min_p": _number("min_p"),
    "repetition_penalty": _number("repetition_penalty"),
    "frequency_penalty": _number("frequency_penalty"),
    "presence_penalty": _number("presence_penalty"),
    "max_new_tokens": _whole("max_new_tokens", 1),
    "min_new_tokens": _whole("min_new_tokens", 0),
    "logit_bias": RowField(
        "logit_bias",
        # Written as JSON writes whole numbers, or one token might stand there twice.
        lambda value: (
            isinstance(value, dict)
            and all(re.fullmatch("0|[1-9][0-9]{0,9}", id_) for id_ in value)
            and all(map(_is_number, value.values()))
        ),
        'an object {"token id": number, ...}',
        lambda value: tuple((int(id_), float(bias)) for id_, bias in value.items()),
    ),
    "structured_outputs": RowField(
        "structured_outputs",
        lambda value: isinstance(value, dict),
        'an object such as {"json": {"type": "object"}}',
        json.dumps,
    ),
    "stop": RowField(
        "stop",
        # An empty list switches the command's own off.
        lambda value: (
            value == []
            or _is_list([value] if is_text(value) else value, lambda stop: is_text(stop) and stop)
        ),
        "a string or a list of strings, none of them empty",
        lambda value: (value,) if is_text(value) else tuple(value),
    ),
    "stop_token_ids": RowField(
        "stop_token_ids",
        lambda value: value == [] or _is_list(value, lambda id_: _is_whole(id_, 0)),
        "a list of token ids",
        tuple,
    ),
    "include_stop_str_in_output": _flag("include_stop_str_in_output"),
    "skip_special_tokens": _flag("skip_special_tokens"),
    "category": RowField("category", is_text, "a string", str),
    "prediction": RowField("prediction", is_text, "a string", str),
}
