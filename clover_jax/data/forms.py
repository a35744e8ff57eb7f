"""The forms in which rows hold text to learn from, and messages as chat templates read them.

Files, `generate`, the server and `api` read messages by `read_messages`, so a template gets the
same from each: every key as it was written, in one spelling.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from clover_jax.data.records import (
    Conversation,
    Message,
    Record,
    Text,
    TokenRow,
    TokenTurns,
    is_text,
    join_turns,
    shown,
)
from clover_jax.errors import UserError

# The keys that each form of a row must have, in the order in which `parse_row` tries them.
_FORMS = (
    ("prompt_ids", "output_ids"),
    ("messages",),
    ("conversations",),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("text",),
)
# What may follow an instruction: Alpaca's name for it and Dolly's.
_MORE = ("input", "context")
# What the system says, where it stands in a key of the row.
SYSTEM = ("system", "system_prompt")
# What `generate --output` writes in addition to token ids, or in the place of them.
_GENERATED = frozenset(
    ("text", "accepted", "target_forwards", "tau", "seconds", "finish_reason", "error", "skipped")
)
# Names of speakers in the wild -> roles of chat templates; other roles are the template's affair.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
    "system": "system",
    "tool": "tool",
}
# Keys with which trainers mark the messages to learn from: OpenAI and Mistral, axolotl, ms-swift.
_LEARNING = ("weight", "train", "training", "loss")
CALLS = ("tool_calls", "function_call")
# What an assistant may write in addition to its content, or in its place.
WRITTEN = (*CALLS, "reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Keys of a row that chat templates of published models read; "chat_template_kwargs" has others.
VARIABLES = (
    *("tools", "documents", "enable_thinking", "reasoning_effort", "builtin_tools"),
    *("custom_tools", "tools_in_user_message", "date_string", "model_identity"),
)
# What `RowTemplate` passes itself.
_RESERVED = ("messages", "conversations", "chat_template", "add_generation_prompt", "now")


class Messages(NamedTuple):
    """Messages as chat templates read them, and the numbers of answers not to be learned."""

    messages: tuple[Message, ...]
    unlearned: tuple[int, ...] = ()


def is_row(value: Any) -> bool:
    """Return whether a JSON value is an object with the keys of a row that `parse_row` reads."""
    return isinstance(value, dict) and any(value.keys() >= set(keys) for keys in _FORMS)


def parse_row(
    row: Any, source: str, unread: collections.Counter[str] | None = None
) -> list[Record]:
    """Return the records of one row, none of one that `generate` could not decode.

    unread: counts the keys that hold something and are not read.
    Raises UserError naming `source`.
    """
    if not isinstance(row, dict):
        raise UserError(f"{source}: expected an object, found {shown(row)}")
    # A null stands for a key that is not there, as merged data sets fill in columns.
    there = {key: value for key, value in row.items() if value is not None}
    form = next((keys for keys in _FORMS if there.keys() >= set(keys)), None)
    # Only `generate` writes rows that say why they hold no text; a data set may have such a key.
    is_generated = there.keys() <= {"index", *_FORMS[0], *_GENERATED} and form != ("text",)
    if is_generated and (there.get("error") or there.get("skipped")):
        return []
    if form is None:
        raise UserError(
            f"{source}: expected prompt and response, instruction and output, messages, "
            "conversations, text, or prompt_ids and output_ids; found "
            f"{', '.join(map(repr, there)) or 'nothing'}"
        )

    # Token ids come first, since rows of `generate` also have the text, and plain text last.
    records: list[Record]
    if form == ("prompt_ids", "output_ids"):
        records, read = _token_rows(there, source), {*form, *_GENERATED}
    elif form == ("text",):
        records, read = [Text(source, _text(there["text"], f"{source}: text"))], {*form}
    else:
        read = {*form, *keys_with(form[0])}
        records = [_conversation(there, form, source)]
    if unread is not None:
        unread.update(there.keys() - read)
    return records


def keys_with(form: str) -> set[str]:
    """Return the keys that are read with the messages, or the text of one, at a key of a row."""
    return {"chat_template_kwargs", *SYSTEM, *VARIABLES, *(_MORE if form == "instruction" else ())}


def _conversation(row: dict[str, Any], form: tuple[str, ...], source: str) -> Conversation:
    """Return the conversation of a row without nulls."""
    messages, unlearned = read_asked(row, form[0], source)
    if len(form) > 1:
        # Answers within the prompt have been given, and are not learned.
        given = tuple(i for i, one in enumerate(messages) if one["role"] == "assistant")
        answers = _side(row, form[1], "assistant", source)
        unlearned = (*given, *(len(messages) + index for index in answers.unlearned))
        messages = (*messages, *answers.messages)
    return Conversation(source, messages, read_variables(row, f"{source}: "), unlearned)


def read_asked(row: Mapping[str, Any], key: str, source: str) -> Messages:
    """Return the messages at a key of a row, or the text of a user's, after the system's."""
    messages, unlearned = _side(row, key, "user", source)
    # Alpaca's rows have an empty input where there is none.
    for name in _MORE if key == "instruction" else ():
        more = _text(row.get(name) or "", f"{source}: {name}")
        if more.strip():
            content = f"{content_text(messages[-1])}\n\n{more}"
            messages = (*messages[:-1], {**messages[-1], "content": content})

    system = read_system(row, source)
    if system and any(message["role"] == "system" for message in messages):
        raise UserError(
            f"{source}: has {' or '.join(SYSTEM)} and a message of the system; give one of the two"
        )
    return Messages((*system, *messages), tuple(len(system) + index for index in unlearned))


def read_system(row: Mapping[str, Any], source: str) -> tuple[Message, ...]:
    """Return the system's message where a key of a row has its text, else nothing."""
    texts = [_text(row.get(key) or "", f"{source}: {key}") for key in SYSTEM]
    said = tuple({"role": "system", "content": text} for text in texts if text)
    if len(said) > 1:
        raise UserError(f"{source}: has {' and '.join(SYSTEM)}; give one of the two")
    return said


def _side(row: Mapping[str, Any], key: str, role: str, source: str) -> Messages:
    """Return a prompt or an answer, which may be a text or a list of messages."""
    value, place = row[key], f"{source}: {key}"
    may_be_list = key in ("prompt", "completion")
    if key in ("messages", "conversations") or (may_be_list and isinstance(value, list)):
        return read_messages(value, place)
    return Messages(({"role": role, "content": _text(value, place)},))


def read_messages(value: Any, place: str) -> Messages:
    """Check messages, a list of objects or its JSON text, and return them in one spelling.

    place: their name in messages to the user: "a.jsonl:3: messages".
    Keys that are null are dropped, as transformers does; calls' arguments that are JSON text are
    read, as servers do before a template sees them.
    Raises UserError that says which message is wrong.
    """
    if isinstance(value, str):
        value = _from_json(value, place)
    if not isinstance(value, list):
        raise UserError(f"{place} must be a list of messages, not {shown(value)}")
    read = [_message(item, f"{place}[{index}]") for index, item in enumerate(value)]
    unlearned = (index for index, (_, is_learned) in enumerate(read) if not is_learned)
    return Messages(tuple(message for message, _ in read), tuple(unlearned))


def _message(item: Any, place: str) -> tuple[Message, bool]:
    """Return a message, and whether it is learned if it is the assistant's."""
    if not isinstance(item, dict):
        raise UserError(f"{place} must be an object with role and content, not {shown(item)}")
    message = {key: value for key, value in item.items() if value is not None}
    speaker = message.get("from")
    if speaker is not None and not (is_text(speaker) and speaker in _SPEAKERS):
        raise UserError(f"{place} is from {shown(speaker)}; it may be from {', '.join(_SPEAKERS)}")
    # ShareGPT's spelling.
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and message.setdefault(ours, message[theirs]) != message[theirs]:
            raise UserError(f"{place} has {theirs} and {ours}; give one of the two")
        message.pop(theirs, None)
    if not is_text(message.get("role")) or not message["role"]:
        raise UserError(
            f"{place}.role must be a name, user for example, not {shown(message.get('role'))}"
        )
    role = message["role"] = _SPEAKERS.get(message["role"], message["role"])

    # Merged columns have an empty list in place of no call.
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    for key in CALLS:
        if key in message:
            message[key] = _calls(message[key], f"{place}.{key}")
    if "content" in message:
        message["content"] = _content(message["content"], f"{place}.content")
    elif not any(key in message for key in WRITTEN):
        raise UserError(f"{place}.content is missing; expected text, or calls of the assistant's")

    given = {key: message[key] for key in _LEARNING if key in message}
    for key, value in given.items():
        if value not in (0, 1):
            raise UserError(f"{place}.{key} must be 0 or 1, false or true, not {shown(value)}")
    marks = set(map(bool, given.values()))
    if len(marks) > 1:
        raise UserError(
            f"{place} has marks that contradict each other: "
            f"{', '.join(f'{key} {shown(value)}' for key, value in given.items())}"
        )
    # A mark that asks for a user's message stays there, and is said to have no reader.
    if role == "assistant" or marks == {False}:
        message = {key: value for key, value in message.items() if key not in _LEARNING}
    return message, marks != {False}


def _content(value: Any, place: str) -> str | list[dict[str, Any]]:
    """Return a text, or a list of parts of text."""
    if not isinstance(value, list):
        return _text(value, place)
    parts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS:
            raise UserError(
                f"{place}[{index}] has the type {shown(kind)}; only text parts are supported"
            )
        text = _text(part.get("text"), f"{place}[{index}].text")
        parts.append({**part, "type": "text", "text": text})
    return parts


def content_text(message: Message) -> str:
    """Return the text of a message's content; parts are on lines of their own, as servers do."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _calls(value: Any, place: str) -> Any:
    """Return calls, one or a list, whose arguments are values and not JSON text."""
    if isinstance(value, list):
        return [_calls(call, f"{place}[{index}]") for index, call in enumerate(value)]
    # OpenAI's calls have a function, others are the function.
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return value | {"function": _calls(value["function"], f"{place}.function")}
    if not isinstance(value, dict) or not is_text(value.get("name")):
        raise UserError(f"{place} must be an object with a function's name, not {shown(value)}")
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        # Models that call without arguments write nothing.
        read = _from_json(arguments, f"{place}.arguments") if arguments.strip() else {}
        return value | {"arguments": read}
    return value


def read_variables(row: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return what a row has for the chat template in addition to messages: tools, documents, ...

    Raises UserError that begins with `source`, "a.jsonl:3: " for example.
    """
    variables = {key: row[key] for key in VARIABLES if row.get(key) is not None}
    more = row.get("chat_template_kwargs")
    more = _from_json(more, f"{source}chat_template_kwargs") if isinstance(more, str) else more
    if not isinstance(more, dict | None) or any(name in _RESERVED for name in more or ()):
        raise UserError(
            f"{source}chat_template_kwargs must be an object without {', '.join(_RESERVED)}, "
            f"not {shown(more)}"
        )
    variables |= more or {}

    # Columns of one type hold tools of different shapes as JSON text, whole or one by one.
    for key in ("tools", "documents"):
        value, place = variables.get(key), f"{source}{key}"
        if isinstance(value, str):
            value = _from_json(value, place) if value.strip() else None
        if isinstance(value, list):
            value = [_from_json(one, place) if isinstance(one, str) else one for one in value]
        if value is None:
            variables.pop(key, None)
        elif not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise UserError(f"{place} must be a list of objects, not {shown(value)}")
        else:
            variables[key] = value
    return variables


def _from_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{place} is a text that is not JSON: {shown(text)}") from None


def _text(value: Any, place: str) -> str:
    if not is_text(value):
        raise UserError(f"{place} must be text, not {shown(value)}")
    return value


def _token_rows(row: dict[str, Any], source: str) -> list[Record]:
    prompts, outputs = row["prompt_ids"], row["output_ids"]
    # With several turns each value is a list, one entry a turn.
    if not (isinstance(outputs, list) and outputs and isinstance(outputs[0], list)):
        prompts, outputs = [prompts], [outputs]
    texts = [*prompts, *outputs] if isinstance(prompts, list) else [prompts]
    are_ids = all(
        # JSON's true is an int in Python.
        isinstance(ids, list) and all(type(id_) is int and id_ >= 0 for id_ in ids)
        for ids in texts
    )
    if not are_ids or len(prompts) != len(outputs):
        raise UserError(
            f"{source}: prompt_ids and output_ids must be lists of token ids, or as many of these "
            "as there are turns"
        )
    turns = [(tuple(a), tuple(b)) for a, b in zip(prompts, outputs, strict=True)]

    joined = join_turns(turns)
    if joined is None:  # a template that drops past thinking: every turn is a row of its own
        return [TokenRow(source, *turn) for turn in turns]
    return [TokenTurns(source, joined) if len(joined) > 1 else TokenRow(source, *joined[0])]
