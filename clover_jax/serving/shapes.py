"""The shapes of OpenAI's bodies, and messages for bodies that do not fit.

A field is done, or harmless (it changes no text and is ignored), or not done and refused by its
name unless its value is the neutral one. A field that nobody knows is refused, as OpenAI does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from clover_jax.data.records import is_text, shown
from clover_jax.decoding.sampling_config import MOST_BIASED
from clover_jax.serving.body import ApiError

MOST_CHOICES = 128  # of `n`
MOST_LOGPROBS = 20
MOST_STOPS = 64

# Fields that are not done here, by the values of theirs that ask for nothing (as null does).
_NEUTRAL: list[tuple[tuple[Any, ...], str]] = [
    ((), "audio chat_template prompt_embeds truncate_prompt_tokens web_search_options"),
    (([],), "allowed_token_ids bad_words documents functions logits_processors tools"),
    (({},), "chat_template_kwargs"),
    (("",), "suffix"),
    ((0,), "prompt_logprobs"),
    ((1,), "length_penalty typical_p"),
    ((True,), "add_generation_prompt add_special_tokens"),
    ((False,), "continue_final_message use_beam_search"),
    (("none", "auto"), "function_call tool_choice"),
    ((["text"], []), "modalities"),
]
# In alphabetical order, in which they are refused.
_NOT_DONE = dict(sorted((name, neutral) for neutral, names in _NEUTRAL for name in names.split()))
_HARMLESS = {
    # The second and the fourth are done in chats; others have no reasoning and no calls.
    *("cache_salt", "include_reasoning", "metadata", "parallel_tool_calls", "priority"),
    *("prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier"),
    *("service_tier", "store"),
}
_NOT_DONE_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"audio": ()}


def _whole_text(value: str) -> str:
    if not is_text(value):
        raise ValueError("must be text that UTF-8 can hold, without half a surrogate pair")
    return value


def _as_prompts(value: Any) -> list[Any]:
    """Return the list of prompts that a value of four forms stands for."""
    # A list of ids is one prompt, a list of lists or of texts several.
    one = isinstance(value, str) or _is_ids(value)
    prompts = [value] if one else value
    if isinstance(prompts, list) and prompts:
        if all(map(_is_ids, prompts)):
            return [tuple(ids) for ids in prompts]
        if all(isinstance(text, str) for text in prompts):
            return [_whole_text(text) for text in prompts]
    raise ValueError(
        "must be text, token ids, or a list of texts or of token ids, none of the lists empty"
    )


def _is_ids(value: Any) -> bool:
    # JSON's true is an int in Python. Which ids are in the vocabulary is checked with the prompt.
    is_filled = isinstance(value, list) and len(value) > 0
    return is_filled and all(type(id_) is int and id_ >= 0 for id_ in value)


def _as_biases(value: Any) -> Any:
    """Return OpenAI's object {"token id": bias} as pairs."""
    if value is None:
        return None
    # One way to write a number, or a token could stand there twice.
    is_right = isinstance(value, dict) and all(
        re.fullmatch("0|[1-9][0-9]{0,9}", id_) and type(bias) in (int, float) and abs(bias) <= 100
        for id_, bias in value.items()
    )
    if not is_right or len(value) > MOST_BIASED:
        raise ValueError(
            f"must be an object of at most {MOST_BIASED} token ids with a number from -100 to 100 "
            'each, such as {"15": -100}'
        )
    return tuple((int(id_), float(bias)) for id_, bias in value.items())


def _as_content(value: Any) -> str:
    """Return the text of a message: itself, or the text of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    # `_refusal` puts the field's name before these messages.
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"[{index}] has the type {shown(kind)}; only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"[{index}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _as_prediction(value: Any) -> Any:
    """Return the text of OpenAI's prediction object."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "content":
        raise ValueError('must be {"type": "content", "content": text}')
    return _as_content(value.get("content"))


Text = Annotated[str, AfterValidator(_whole_text)]
_Stop = Annotated[Text, Field(min_length=1)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _Shape(pydantic.BaseModel):
    # Strict: "1" and true are not numbers. Null stands for what is not there.
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _StreamOptions(_Shape):
    include_usage: bool | None = None


class CommonRequest(_Shape):
    """Fields of both endpoints."""

    model: Text | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    best_of: int | None = None
    temperature: float | None = None  # `SamplingParams` checks these values
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_tokens: int | None = Field(None, ge=0)
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, BeforeValidator(_as_biases)] = None
    stop: Annotated[
        Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None,
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = None
    stop_token_ids: Annotated[list[_Id], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    # At most one of these says what the answer must match: `requests.form_of`.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    prediction: Annotated[Text | None, BeforeValidator(_as_prediction)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: Text | None = None
    # These two are ours.
    forwards: bool | None = None
    draft: Text | None = None


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class Message(_Shape):
    """One message of a conversation; `read_messages` reads the rest of it."""

    model_config = pydantic.ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]


class _Conversation(_Shape):
    """What a chat template reads."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Text | None = None


class ChatRequest(CommonRequest, _Conversation):
    """The body of /v1/chat/completions."""

    # One mistake is reported; a list of thousands of them would only take time.
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Completions support echo, so it cannot be among `_NOT_DONE`.
    echo: Literal[False] | None = None


class TokenizeRequest(_Conversation):
    """The body of /tokenize, as vLLM has it: a text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Shape):
    """The body of /detokenize, as vLLM has it."""

    model: Text | None = None
    tokens: Annotated[list[_Id], Field(fail_fast=True)]


S = TypeVar("S", bound=_Shape)
# Words used instead of pydantic's own for these kinds of mistakes.
_WORDS = {"missing": "is missing", "model_type": "must be an object"}


def validated(kind: type[S], body: Mapping[str, Any]) -> S:
    """Return a body in its shape; raises ApiError naming the first field that is wrong."""
    # Before the shape is checked, which ignores every field that it does not know.
    not_done = {name: _NOT_DONE[name] for name in _NOT_DONE if name not in kind.model_fields}
    _refuse_not_done(body, not_done, "")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse_not_done(message, _NOT_DONE_IN_MESSAGES, f"messages[{index}].")
    unknown = sorted(body.keys() - kind.model_fields - _NOT_DONE.keys() - _HARMLESS)
    if unknown:
        raise ApiError(f"unknown field {shown(unknown[0])}", param=unknown[0])
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _refuse_not_done(values: Mapping, not_done: Mapping[str, tuple[Any, ...]], within: str) -> None:
    for name, harmless in not_done.items():
        value = values.get(name)
        # Null and a neutral value ask for nothing, and clients often send them.
        is_bool = isinstance(value, bool)  # True equals 1 in Python
        same = (value == other and isinstance(other, bool) == is_bool for other in harmless)
        if value is None or any(same):
            continue
        instead = f", or give {shown(harmless[0])}" if harmless else ""
        raise ApiError(
            f"{within}{name} is not supported here: leave it out{instead}", param=within + name
        )


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """Return a message for the first thing that is wrong."""
    # The field's place is a path of names and numbers, as in messages[0].content.
    first = error.errors(include_url=False)[0]
    name = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    name = name.removeprefix(".")
    if first["type"] in _WORDS:
        return ApiError(f"{name} {_WORDS[first['type']]}", param=name)

    words = re.sub("^(Input|List|String|Value) should", "must", first["msg"])
    words = words.removeprefix("Value error, ").replace(" after validation", "")
    # A part of a content is named by its number; lengths are reported with their value.
    space = "" if words.startswith("[") else " "
    value = "" if ", not " in words else f", not {shown(first['input'])}"
    return ApiError(f"{name}{space}{words}{value}", param=name)
