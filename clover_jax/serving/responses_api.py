"""OpenAI's /v1/responses, without storage: its bodies as chats, and its answers as items.

A request says everything, as a chat does; nothing is kept, so a response cannot be continued by its
id. Items of an answer are what was thought, the message, and the calls of functions.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from clover_jax.data.records import shown
from clover_jax.decoding.row_state import TurnProgress
from clover_jax.serving.body import ApiError
from clover_jax.serving.calls import Part
from clover_jax.serving.requests import Call, Served, read_chat
from clover_jax.serving.responses import ChatAnswers, event
from clover_jax.serving.token_texts import TokenTexts

# Fields that chats have under the same name.
_SAME = {
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "stream"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "parallel_tool_calls", "user"),
    *("chat_template_kwargs", "enable_thinking", "include_reasoning", "metadata", "store"),
    *("service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
}
_OWN = {"input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools"}
# What is not done, by the values of theirs that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),  # there is none
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def read_response(body: Mapping[str, Any], served: Served, peer: str) -> Call:
    """Check a body of /v1/responses and return it as the call of a chat; raises ApiError."""
    for name, neutral in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(f"{name} is not supported here: leave it out", param=name)
    unknown = sorted(body.keys() - _SAME - _OWN - _NEUTRAL.keys())
    if unknown:
        raise ApiError(f"unknown field {shown(unknown[0])}", param=unknown[0])

    chat = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    tools = _given(body, "tools", list, "a list")
    chat["tools"] = [_nested(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    chat["tool_choice"] = _nested(choice, "tool_choice") if isinstance(choice, dict) else choice
    reasoning, text = (_given(body, name, dict, "an object") for name in ("reasoning", "text"))
    chat["reasoning_effort"] = reasoning.get("effort")
    if text.get("verbosity") not in (None, "medium"):
        raise ApiError("text.verbosity is not supported here: leave it out", param="text")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    chat["response_format"] = form

    try:
        call = read_chat(chat, served, peer)
    except ApiError as error:
        names = {"max_completion_tokens": "max_output_tokens", "response_format": "text"}
        error.param = names.get(error.param or "", error.param)
        raise
    return dataclasses.replace(call, response_of=body)


def _given(body: Mapping[str, Any], name: str, kind: type, said: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(f"{name} must be {said}, not {shown(value)}", param=name)
    return value or kind()


def _nested(tool: Any, place: str) -> dict[str, Any]:
    """Return a tool, or the choice of one, as chats have them."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ApiError(f"{place} must be a function, not {shown(kind)}", param=place)
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return instructions and input as messages of a chat."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(
            f"input must be a text or a list of items, not {shown(given)}", param="input"
        )

    for index, item in enumerate(given):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise ApiError(f"{place} must be an object, not {shown(item)}", param=place)
        kind = item.get("type", "message")
        if kind == "function_call_output":
            output = _content(item.get("output"), place)
            message = {"tool_call_id": item.get("call_id"), "content": output}
            messages.append({"role": "tool", **message})
        elif kind == "message" and item.get("role") != "assistant":
            content = _content(item.get("content"), place)
            messages.append({"role": item.get("role"), "content": content})
        else:
            # Thinking, text and calls that follow one another are one message.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            _add_item(messages[-1], kind, item, place)
    return messages


def _add_item(message: dict[str, Any], kind: str, item: Mapping[str, Any], place: str) -> None:
    """Add an item of an earlier answer to the assistant's message."""
    if kind == "message":
        text = _content(item.get("content"), place)
        message["content"] = message.get("content", "") + text
    elif kind == "reasoning":
        text = _content(item.get("content") or [], place)
        if text:
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        raise ApiError(f"{place}: items of type {shown(kind)} are not supported", param=place)


def _content(value: Any, place: str) -> str:
    """Return the text of an item: itself, or that of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(f"{place}.content must be a text or a list of parts", param=place)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text", "text"):
            raise ApiError(f"{place}: parts of type {shown(kind)} are not supported", param=place)
        if not isinstance(part.get("text"), str):
            raise ApiError(f"{place}: the text of a part must be a string", param=place)
        texts.append(part["text"])
    return "\n".join(texts)


class ResponseAnswers(ChatAnswers):
    """Bodies and events of /v1/responses."""

    done = b""

    def __init__(self, call: Call, model: str, texts: TokenTexts):
        super().__init__(call, model, texts)
        self._id, self._number = f"resp_{uuid.uuid4().hex}", 0
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may get more
        self._thought = ""

    def whole(self, ended: Sequence[TurnProgress]) -> dict[str, Any]:
        (progress,) = ended
        parts = self._split(0, progress, progress.turn.text or "")
        self._take([*parts, *self._split(0, progress, None)])
        self._close()
        return self._response(ended)

    def next(self, index: int, progress: TurnProgress, compile_seconds: float = 0.0) -> list[dict]:
        """Return the events of what is new."""
        events = []
        if index not in self._begun:
            self._begun.add(index)
            for name in ("created", "in_progress"):
                events.append(self._event(f"response.{name}", response=self._response()))
        text = "".join(piece.text for piece in progress.pieces)
        events += self._take(self._split(index, progress, text))
        if progress.ended:
            events += self._take(self._split(index, progress, None))
            events += self._close()
        return events

    def last(self, ended: Sequence[TurnProgress]) -> list[dict[str, Any]]:
        """Return the event with the whole response."""
        response = self._response(ended)
        return [self._event(f"response.{response['status']}", response=response)]

    def event(self, value: Mapping[str, Any]) -> bytes:
        """Return an event under its name."""
        if "error" in value and "type" not in value:  # a refusal in the middle of a stream
            error = value["error"]
            told = {name: error[name] for name in ("code", "message", "param")}
            value = self._event("error", **told)
        return f"event: {value['type']}\n".encode() + event(value)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _take(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Add parts to the items; return the events."""
        kind = {"reasoning": "reasoning", "content": "message", "call": "function_call"}
        events = []
        for part in parts:
            # Text of another kind, and every call, begins an item.
            is_new = part.name is not None or not self._is_open
            if is_new or self._items[-1]["type"] != kind[part.kind]:
                events += self._close() + self._open(part)

            if part.text:
                item = self._items[-1]
                if part.kind == "call":
                    item["arguments"] += part.text
                    name = "function_call_arguments"
                else:
                    item["content"][0]["text"] += part.text
                    name = item["content"][0]["type"]
                place = self._place() | self._within()
                events.append(self._event(f"response.{name}.delta", delta=part.text, **place))
            if part.kind == "reasoning":
                self._thought += part.text
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _within(self) -> dict[str, Any]:
        """Return what events say of the text of the last item; {} for a call."""
        (part,) = self._items[-1].get("content") or [{}]
        if not part:
            return {}
        return {"content_index": 0, **({"logprobs": []} if "logprobs" in part else {})}

    def _open(self, part: Part) -> list[dict[str, Any]]:
        """Begin an item."""
        name, number = uuid.uuid4().hex, len(self._items)
        added: list[dict[str, Any]] = []
        if part.kind == "call":
            head = {"type": "function_call", "id": f"fc_{name}", "call_id": part.id}
            item: dict[str, Any] = {**head, "name": part.name, "arguments": ""}
        elif part.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": []}
            added = [{"type": "reasoning_text", "text": ""}]
        else:
            item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": []}
            added = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        item["status"] = "in_progress"
        # What an event shows must not grow with the item.
        shown_item = {**item, "content": []} if added else dict(item)
        events = [self._event("response.output_item.added", output_index=number, item=shown_item)]
        self._items.append(item)
        self._is_open = True
        for part_ in added:
            place = {**self._place(), "content_index": 0}
            events.append(self._event("response.content_part.added", part=dict(part_), **place))
            item["content"].append(part_)
        return events

    def _close(self) -> list[dict[str, Any]]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return []
        item, place, self._is_open = self._items[-1], self._place(), False
        item["status"] = "completed"
        events = []

        # What the item holds ends first, then the item.
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **told, **place))
        else:
            (part,) = item["content"]
            name, within = f"response.{part['type']}.done", self._within()
            events.append(self._event(name, text=part["text"], **place, **within))
            place |= {"content_index": 0}
            events.append(self._event("response.content_part.done", part=part, **place))
        number = place["output_index"]
        events.append(self._event("response.output_item.done", output_index=number, item=item))
        return events

    def _response(self, ended: Sequence[TurnProgress] = ()) -> dict[str, Any]:
        """Return the response so far, or with its end."""
        asked = self.call.response_of or {}
        settings = self.call.asks[0].settings
        is_cut = bool(ended) and ended[0].turn.finish_reason == "length"
        status = "incomplete" if is_cut else "completed" if ended else "in_progress"
        if is_cut and self._items:
            self._items[-1]["status"] = "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._head["model"],
            "output": list(self._items),
            "usage": self._usage(ended) if ended else None,
            # What was asked for, with what holds where nothing was said.
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "background": False,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "user": asked.get("user"),
        }

    def _usage(self, ended: Sequence[TurnProgress]) -> dict[str, Any]:
        usage = self.usage(ended)
        thought = self._texts.encode(self._thought, add_special_tokens=False)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(thought)},
            "total_tokens": usage["total_tokens"],
        }
