"""Bodies of OpenAI's API become asks, and what is wrong with one is said by its field's name."""

import asyncio

import pytest
from starlette.requests import Request

from clover_jax.errors import UserError
from clover_jax.serving.body import ApiError, parse_object, read_object
from clover_jax.serving.requests import Served, read_chat, read_completion

SERVED = Served("tiny", 1024, 16)
MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**body):
    return read_completion({"prompt": "Hi"} | body, SERVED, "10.0.0.1")


def chat(**body):
    return read_chat({"messages": MESSAGES} | body, SERVED, "10.0.0.1")


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [(1, 2)]),
        ([[1, 2], [3]], [None, None], [(1, 2), (3,)]),
    ],
)
def test_a_prompt_has_four_forms(given, texts, ids):
    prompts = [ask.prompt for ask in completion(prompt=given).asks]
    assert [prompt.text for prompt in prompts] == texts
    assert [prompt.prompt_ids for prompt in prompts] == ids


def test_defaults_are_those_of_openai():
    (ask,) = completion().asks
    settings = ask.settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (1.0, 1.0, 0)
    assert (settings.max_new_tokens, settings.stop, settings.seed) == (16, (), None)
    assert (ask.client, ask.top_logprobs, ask.watched_by) == ("10.0.0.1", None, None)
    # A chat goes on as long as the context has room.
    assert chat().asks[0].settings.max_new_tokens == 1024


def test_fields_reach_the_settings():
    call = completion(
        temperature=0, top_p=0.5, top_k=7, stop="x", seed=2**32 + 5, max_tokens=9, user="me",
        ignore_eos=True, stream=True, stream_options={"include_usage": True}, logprobs=3, n=2,
        min_tokens=4, logit_bias={"5": -100, "0": 0.5},
        model="tiny",
    )  # fmt: skip
    settings = call.asks[0].settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.0, 0.5, 7)
    # Keys have 32 bits, and OpenAI's seeds 64.
    assert (settings.stop, settings.seed, settings.max_new_tokens) == (("x",), 5, 9)
    assert settings.ignore_eos
    assert (settings.min_new_tokens, settings.logit_bias) == (4, ((5, -100.0), (0, 0.5)))
    assert [ask.choice for ask in call.asks] == [0, 1]
    assert (call.asks[0].client, call.asks[0].top_logprobs) == ("me", 3)
    assert call.asks[0].watched_by == "chunk"
    assert completion(stream=True, forwards=True).asks[0].watched_by == "copy"
    assert (call.streams, call.include_usage) == (True, True)


def test_top_k_of_minus_one_is_all():
    assert completion(top_k=-1).asks[0].settings.top_k == 0


def test_max_completion_tokens_go_before_max_tokens():
    assert chat(max_tokens=5, max_completion_tokens=7).asks[0].settings.max_new_tokens == 7
    assert chat(max_tokens=5).asks[0].settings.max_new_tokens == 5


def test_max_tokens_of_zero_shows_the_prompt_alone():
    call = completion(max_tokens=0, echo=True, logprobs=0)
    assert call.no_output
    assert call.asks[0].settings.max_new_tokens == 1
    assert call.asks[0].prompt_logprobs


def test_parts_of_text_pass_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, *MESSAGES]
    assert chat(messages=messages).asks[0].prompt.messages == (
        {"role": "system", "content": parts},
        {"role": "user", "content": "Hi"},
    )


def test_calls_and_tools_reach_the_template_whole():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [*MESSAGES, said, result], "tools": tools, "tool_choice": "auto"}
    prompt = chat(**body, chat_template_kwargs={"enable_thinking": False}).asks[0].prompt
    assert prompt.variables == {"tools": tools, "enable_thinking": False}
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert prompt.messages[1:] == ({"role": "assistant", "tool_calls": [read]}, result)
    with pytest.raises(ApiError, match="the model's chat template has no place for them"):
        read_chat({"messages": MESSAGES, "tools": tools}, SERVED._replace(reads_tools=False), "me")


def test_a_prediction_is_text_or_parts_of_it():
    for content in ("foo", [{"type": "text", "text": "foo"}]):
        call = chat(prediction={"type": "content", "content": content})
        assert call.asks[0].prompt.prediction == "foo"


def test_what_changes_nothing_passes():
    neutral = {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}, "min_p": 0,
        "min_tokens": 0,
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "suffix": None,
        "best_of": 1, "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
    }  # fmt: skip
    assert completion(**neutral).asks == completion().asks


BAD_COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": "a\ud83d"}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 17}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"best_of": 2}, "best_of"),
    ({"user": 5}, "user"),
    ({"prediction": {"content": "a"}}, "prediction"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    # What is not done here.
    ({"suffix": "b"}, "suffix"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"min_p": 0.1}, "min_p"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
]
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "me", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0]",
    ),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_a_completion_that_cannot_be_is_refused_by_its_field(body, param):
    with pytest.raises(ApiError, match=param.partition("[")[0]) as refused:
        completion(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_a_chat_that_cannot_be_is_refused_by_its_field(body, param):
    with pytest.raises(ApiError, match=param.partition("[")[0]) as refused:
        chat(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_another_model_is_not_found():
    with pytest.raises(
        ApiError, match='"gpt-4" does not exist here; the one served is "tiny"'
    ) as e:
        chat(model="gpt-4")
    assert (e.value.status, e.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": 1e39}, r"temperature \(1e\+39\) must be"),
        ({"temperature": -1}, r"temperature \(-1.0\) must be 0 or more"),
        ({"top_p": 0}, r"top_p \(0.0\) must lie in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p \(1.5\) must lie in \(0, 1\]"),
    ],
)
def test_what_makes_no_distribution_is_a_user_s_mistake(body, said):
    with pytest.raises(UserError, match=said):
        completion(**body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": Infinity}', "Infinity is no number"),
        (b'{"a": 1, "a": 2}', 'the key "a" is there twice'),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body, said):
    with pytest.raises(ApiError, match=said):
        parse_object(body)


@pytest.mark.parametrize("parts", [[], [b'{"prompt": ']])
def test_a_body_that_never_ends_is_not_waited_for(parts):
    arriving = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive():
        if not arriving:
            await asyncio.Event().wait()
        return arriving.pop()

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(ApiError, match=r"did not arrive within 0\.01 s") as refused:
        asyncio.run(read_object(request, 100, seconds=0.01))
    assert (refused.value.status, refused.value.headers["Connection"]) == (408, "close")
