"""The keys of a prompt row: what each may hold, and which attribute of `Prompt` it becomes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from clover_jax.data.text import is_text

_ROLES = ("system", "user", "assistant", "tool")


class RowField(NamedTuple):
    """One key of a row.

    Attributes:
      attribute: of `Prompt`.
      is_right: whether a JSON value may stand there.
      wanted: what may stand there, in words that follow "must be".
      convert: from the JSON value to the attribute's.
    """

    attribute: str
    is_right: Callable[[Any], bool]
    wanted: str
    convert: Callable[[Any], Any]


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_right, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return value.get("role") in _ROLES and is_text(value.get("content"))


def _are_messages(value: Any) -> bool:
    return _is_list(value, _is_message) and value[-1]["role"] != "assistant"


def _are_stops(value: Any) -> bool:
    # An empty list switches the command's own off.
    return value == [] or _is_list(
        [value] if is_text(value) else value, lambda stop: is_text(stop) and stop
    )


def _as_messages(value: list) -> tuple[dict[str, str], ...]:
    return tuple({"role": item["role"], "content": item["content"]} for item in value)


def _whole(attribute: str, least: int, remark: str = "") -> RowField:
    wanted = f"a whole number from {least}{remark}"
    return RowField(attribute, lambda value: _is_whole(value, least), wanted, int)


ROW_FIELDS = {
    "prompt": RowField("text", is_text, "a string", str),
    # A question is put to somebody: a conversation of one turn.
    "question": RowField("turns", is_text, "a string", lambda value: (value,)),
    "prompt_ids": RowField(
        "prompt_ids",
        lambda value: _is_list(value, lambda id_: _is_whole(id_, 0)),
        "a list of token ids, at least one",
        tuple,
    ),
    "messages": RowField(
        "messages",
        _are_messages,
        f'a list of {{"role": {"|".join(_ROLES)}, "content": text}}, the last not the assistant\'s',
        _as_messages,
    ),
    "turns": RowField(
        "turns",
        lambda value: _is_list(value, is_text),
        "a list of strings, at least one",
        tuple,
    ),
    "seed": _whole("seed", 0),
    "temperature": RowField(
        "temperature", lambda value: _is_number(value) and value >= 0, "a number from 0", float
    ),
    "top_k": _whole("top_k", 0, " (0: all)"),
    "top_p": RowField(
        "top_p",
        lambda value: _is_number(value) and 0 < value <= 1,
        "a number above 0 and up to 1",
        float,
    ),
    "max_new_tokens": _whole("max_new_tokens", 1),
    "stop": RowField(
        "stop",
        _are_stops,
        "a string or a list of strings, none of them empty",
        lambda value: (value,) if is_text(value) else tuple(value),
    ),
    "category": RowField("category", is_text, "a string", str),
}
