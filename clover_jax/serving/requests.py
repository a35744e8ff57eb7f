"""Bodies of OpenAI's API, checked and turned into requests to the scheduler (asks)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from clover_jax.data.forms import VARIABLES, read_messages, read_variables
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import shown
from clover_jax.decoding.grammars import FORMS, form_text
from clover_jax.decoding.row_settings import GenerationSettings, Grain
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.errors import UserError
from clover_jax.serving.body import ApiError
from clover_jax.serving.calls import Splitter, Style
from clover_jax.serving.shapes import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    validated,
)

_SEEDS = 2**32  # keys have 32 bits; OpenAI's seeds have 64
_COMPLETION_TOKENS = 16  # at most, by default

R = TypeVar("R", bound=CommonRequest)


class Served(NamedTuple):
    """What a request is checked against.

    model: the name that it may ask for. max_model_len: tokens of a prompt and its answer.
    max_asks: choices that one request may have, over all of its prompts.
    template_words: the words of the chat template, which reads a variable that is one of them.
    usual: the sampling of requests that do not say.
    style: how the base writes calls of tools and what it thinks.
    """

    model: str
    max_model_len: int
    max_asks: int
    template_words: frozenset[str] = frozenset({"tools"})
    usual: SamplingParams = SamplingParams(temperature=1.0)
    style: Style = Style()


@dataclasses.dataclass(frozen=True)
class Ask:
    """One choice of one API request: what takes one slot.

    A body becomes a Call with an Ask for each choice, which the engine gets as a Request.

    client: the queue is round-robin over clients.
    choice: number of the choice of `n`; each has its own random key.
    watched_by: the parts in which text is streamed, as in `RowState`.
    top_logprobs: alternatives to each token of the answer; None for no log-probabilities at all.
    prompt_logprobs: whether the prompt's tokens are scored too.
    must_fit: whether the context must have room for all tokens of the settings; else for one.
    shown: special tokens that are part of the text, marks of calls for example.
    form_field: the field that says what the answer must match.
    """

    prompt: Prompt
    settings: GenerationSettings
    client: str = ""
    choice: int = 0
    watched_by: Grain | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    must_fit: bool = False
    shown: tuple[str, ...] = ()
    form_field: str | None = None

    def check_room(self, num_tokens: int, context: int) -> None:
        """Raise ApiError where a prompt of `num_tokens` tokens leaves too little of the context."""
        # A limit that the client gave must fit; a default means as many as there is room for.
        max_tokens = self.settings.max_new_tokens if self.must_fit else 1
        if num_tokens + max_tokens <= context:
            return
        # A shorter answer helps only where the prompt by itself leaves room.
        # Clients know what has happened by these words alone, and then compact their history.
        words = f"this model's maximum context length is {context} tokens"
        if num_tokens >= context:
            words = (
                f"prompt is too long: {num_tokens} tokens; {words}, answer included; give "
                f"{context - 1} or fewer"
            )
        else:
            words = (
                f"{words}, and the prompt's {num_tokens} tokens and max_tokens ({max_tokens}) are "
                f"{num_tokens + max_tokens}; ask for {context - num_tokens} or fewer, or shorten "
                "the prompt"
            )
        source = self.prompt.source
        raise ApiError(f"{source}: {words}", param=source, code="context_length_exceeded")


class Splitting(NamedTuple):
    """How the text of a chat's answers is split into calls, thinking and the rest.

    tools: those that may be called. most_calls: None for any number. shows_thinking: whether the
    answer has what was thought. has_form: whether the answer must match a form, which leaves no
    room for thinking.
    """

    style: Style
    tools: Sequence[Mapping[str, Any]] = ()
    most_calls: int | None = None
    shows_thinking: bool = True
    has_form: bool = False

    def splitter(self, prompt_end: str) -> Splitter:
        """Return the splitter of an answer to a prompt that ends so."""
        thinking = self.style.thinking
        opened = thinking is not None and prompt_end.rstrip().endswith(thinking[0])
        is_thinking = opened and not self.has_form
        return Splitter(self.style, self.tools, is_thinking, self.most_calls)


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request: what to decode, and what the answer shows.

    asks: the choices of the first prompt, then of the next, `n` each.
    echo: whether the prompt stands before its answer.
    no_output: the answer's only token is left out (max_tokens 0).
    tells_forwards: whether a streamed piece has the number of its forward.
    draft: what to draft with, to compare; None is the server's own.
    splitting: None where an answer is its text.
    response_of: the body of /v1/responses that it comes from.
    """

    asks: list[Ask]
    n: int
    is_chat: bool
    streams: bool = False
    include_usage: bool = False
    echo: bool = False
    no_output: bool = False
    tells_forwards: bool = False
    draft: str | None = None
    splitting: Splitting | None = None
    response_of: Mapping[str, Any] | None = None


def read_completion(body: Mapping[str, Any], served: Served, peer: str) -> Call:
    """Check a body of /v1/completions.

    peer: the client's address, its name where the request has none.
    Raises ApiError, or UserError for values that make no distribution.
    """
    request = _checked(CompletionRequest, body, served)
    # With echo, max_tokens=0 asks for the prompt's scores; without echo it asks for nothing.
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    return _call(
        request,
        _prompts(request.prompt, request.prediction),
        served,
        peer,
        max_tokens=request.max_tokens,
        usual_tokens=_COMPLETION_TOKENS,
        top_logprobs=request.logprobs,
        echo=bool(request.echo),
        form=form_of(request),
    )


def read_chat(body: Mapping[str, Any], served: Served, peer: str) -> Call:
    """Check a body of /v1/chat/completions, as `read_completion` does."""
    request = _checked(ChatRequest, body, served)
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = conversation_prompt(request, request.messages, served, request.prediction)
    # Clients send the limit by its newer name, by its older one, or by both.
    newer, older = request.max_completion_tokens, request.max_tokens
    # Calls are looked for where the client can take them.
    is_calling = bool(request.tools) and request.tool_choice != "none"
    form, forced = form_of(request), call_form(request)
    if forced is not None:
        if form is not None:
            raise ApiError(f"{form.field} does not go with calls that must be", param=form.field)
        form = Form("tool_choice", forced)
    splitting = Splitting(
        # Calls that must be are a list of JSON objects, whatever the base's own format.
        served.style if forced is None else Style("llama"),
        request.tools or () if is_calling else (),
        1 if request.parallel_tool_calls is False else None,
        request.include_reasoning is not False,
        has_form=form is not None,
    )
    call = _call(
        request,
        [prompt],
        served,
        peer,
        max_tokens=older if newer is None else newer,
        # Without a limit: as many tokens as the context leaves room for.
        usual_tokens=served.max_model_len,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        shown=served.style.marks,
        form=form,
    )
    is_split = splitting.style != Style()
    return dataclasses.replace(call, splitting=splitting) if is_split else call


class Form(NamedTuple):
    """What an answer must match, as `grammars.form_text` returns it, and the field that says so."""

    field: str
    text: str


def form_of(request: CommonRequest) -> Form | None:
    """Return what the answer must match; None for any text. Raises ApiError, naming the field."""
    guided = {name: getattr(request, f"guided_{name}") for name in FORMS if name != "json_object"}
    given = {f"guided_{name}": {name: value} for name, value in guided.items() if value is not None}
    if request.structured_outputs is not None:
        given["structured_outputs"] = request.structured_outputs
    if asked := _asked_format(request.response_format or {"type": "text"}):
        given["response_format"] = asked
    if not given:
        return None

    # One form, under the name that the client gave it.
    field, form = min(given.items())
    if len(given) > 1:
        raise ApiError(f"give one of {' and '.join(sorted(given))}", param=field)
    try:
        return Form(field, form_text(form) or "")
    except UserError as error:
        raise ApiError(str(error).replace("structured_outputs", field, 1), param=field) from None


def _asked_format(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's response_format as a form; {} for any text."""
    match asked.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            inner = asked.get("json_schema")
            if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
                return {"json": inner["schema"]}
            raise ApiError(
                'response_format must have "json_schema": {"name": text, "schema": object}',
                param="response_format",
            )

    # Any other type, or none.
    raise ApiError(
        f"response_format: type must be text, json_object or json_schema, not "
        f"{shown(asked.get('type'))}",
        param="response_format",
    )


def call_form(request: ChatRequest) -> str | None:
    """Return the form of an answer that must be calls of tools; None where the base may choose."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return None
    tools = {}
    for tool in request.tools or ():
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            tools[function["name"]] = function.get("parameters") or {"type": "object"}
    named = choice.get("function") if isinstance(choice, dict) else None
    names = list(tools) if choice == "required" else []
    if isinstance(named, dict) and named.get("name") in tools:
        names = [named["name"]]
    if not names:
        raise ApiError(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": '
            f"one of tools}}}}, not {shown(choice)}",
            param="tool_choice",
        )

    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(tools[name], f"#/items/anyOf/{number}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, name in enumerate(names)
    ]
    several = choice == "required" and request.parallel_tool_calls is not False
    most = {} if several else {"maxItems": 1}
    return form_text({"json": {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}})


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that stands at `place` of another; its references to itself lead there."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        match part:
            case {"$ref": str(target)} if target == "#" or target.startswith("#/"):
                return part | {"$ref": place + target[1:]}
        return part

    # The parser of JSON walks through schemas that are nested too deeply for our own recursion.
    return json.loads(json.dumps(schema), object_hook=move)


def conversation_prompt(
    request: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    served: Served,
    prediction: str | None = None,
) -> Prompt:
    """Return the prompt of messages, with the tools and the like of their body.

    Raises ApiError for messages that cannot be read.
    """
    # OpenAI has renamed the system to developer; templates know it by its old name.
    listed = [
        item.model_dump(exclude_unset=True) | {"role": item.role.replace("developer", "system")}
        for item in messages
    ]
    body = request.model_dump(include={*VARIABLES, "chat_template_kwargs"})
    try:
        read = read_messages(listed, "messages").messages
        variables = read_variables(body)
    except UserError as error:
        raise ApiError(str(error), param=str(error).split(" ")[0]) from None
    for name, value in variables.items():
        if value and name not in served.template_words:
            raise ApiError(f"{name}: the model's chat template has no place for it", param=name)
    return Prompt(0, "messages", messages=read, variables=variables, prediction=prediction)


def _checked(kind: type[R], body: Mapping[str, Any], served: Served) -> R:
    request = validated(kind, body)
    check_model(request.model, served.model)
    return request


def check_model(asked: str | None, served: str) -> None:
    """Raise ApiError for a model that is not the one served; None takes any."""
    if asked is not None and asked != served:
        raise ApiError(
            f"the model {shown(asked)} does not exist here; the one served is {shown(served)}",
            HTTPStatus.NOT_FOUND,
            param="model",
            code="model_not_found",
        )


def _call(
    request: CommonRequest,
    prompts: Sequence[Prompt],
    served: Served,
    peer: str,
    *,
    max_tokens: int | None,
    usual_tokens: int,
    top_logprobs: int | None,
    echo: bool = False,
    shown: tuple[str, ...] = (),
    form: Form | None = None,
) -> Call:
    n, streams, usual = request.n or 1, bool(request.stream), served.usual
    # Of more choices the best would have to be picked.
    if request.best_of not in (None, n):
        raise ApiError(
            f"best_of ({request.best_of}) other than n ({n}) is not supported", param="best_of"
        )
    if request.stream_options is not None and not streams:
        raise ApiError("stream_options is for stream=true", param="stream_options")
    if len(prompts) * n > served.max_asks:
        raise ApiError(
            f"prompt ({len(prompts)}) and n ({n}) ask for {len(prompts) * n} texts at once, and "
            f"the queue holds {served.max_asks}: ask for fewer in one request",
            param="n" if len(prompts) == 1 else "prompt",
        )

    # The engine gives one token at least; `no_output` then leaves it out of the answer.
    most_tokens = usual_tokens if max_tokens is None else max(max_tokens, 1)
    if (request.min_tokens or 0) > most_tokens:
        raise ApiError(
            f"min_tokens ({request.min_tokens}) must be at most max_tokens ({most_tokens})",
            param="min_tokens",
        )
    asked = {name: getattr(request, name) for name in vars(usual)}
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = vars(usual) | given
    # Keeping all tokens is -1 in vLLM's API and 0 here.
    sampling["top_k"] = max(sampling["top_k"], 0)
    settings = GenerationSettings(
        **sampling,
        max_new_tokens=most_tokens,
        min_new_tokens=request.min_tokens or 0,
        logit_bias=request.logit_bias or (),
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        ignore_eos=bool(request.ignore_eos),
        structured_outputs=form and form.text,
        seed=None if request.seed is None else request.seed % _SEEDS,
    )
    # Without a stream the text is wanted at the end only, which is cheaper.
    watched_by: Grain | None = None
    if streams:
        watched_by = "copy" if request.forwards else "chunk"
    asks = [
        Ask(
            prompt,
            settings,
            client=request.user or peer,
            choice=choice,
            watched_by=watched_by,
            top_logprobs=top_logprobs,
            prompt_logprobs=echo and top_logprobs is not None,
            must_fit=max_tokens is not None,
            shown=shown,
            form_field=form and form.field,
        )
        for prompt in prompts
        for choice in range(n)
    ]
    return Call(
        asks,
        n,
        is_chat=isinstance(request, ChatRequest),
        streams=streams,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        echo=echo,
        no_output=max_tokens == 0,
        tells_forwards=bool(request.forwards),
        draft=request.draft,
    )


def _prompts(value: list[str] | list[list[int]], prediction: str | None) -> list[Prompt]:
    many = len(value) > 1
    prompts = []
    for index, part in enumerate(value):
        # Messages about a prompt begin with its name.
        source = f"prompt[{index}]" if many else "prompt"
        form: dict[str, Any] = {"text": part} if isinstance(part, str) else {"prompt_ids": part}
        prompts.append(Prompt(index, source, prediction=prediction, **form))
    return prompts
