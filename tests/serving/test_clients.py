"""Unmodified clients, OpenAI's and LangChain's, work with the server.

pip install -e '.[test,clients]'; python -m pytest -n0 -m servers tests/serving/test_clients.py
"""

import asyncio
from typing import Literal

import pydantic
import pytest

from clover_jax.serving.calls import Style
from tests.serving.asking import Scripted, scripted_app
from tests.serving.conftest import AREA, CLOSE, KEY, KINDS, MESSAGES

httpx = pytest.importorskip("httpx2", reason="pip install -e '.[clients]'")
openai = pytest.importorskip("openai", reason="pip install -e '.[clients]'")
pytestmark = pytest.mark.servers

TOOLS = [{"type": "function", "function": {"name": "f"}}]
GREEDY = {"model": "tiny", "max_tokens": 24, "temperature": 0}


def options(server, key=KEY):
    return {"base_url": f"{server.url}/v1", "api_key": key, "max_retries": 0}


@pytest.fixture
def ask(server):
    with openai.OpenAI(**options(server)) as client:
        yield client


def test_models_are_listed(ask):
    assert [model.id for model in ask.models.list()] == ["tiny"]
    assert ask.models.retrieve("tiny").id == "tiny"


def test_completions(ask, alone):
    answer = ask.completions.create(prompt=AREA, **GREEDY)
    assert answer.choices[0].text == alone[0]["text"]
    assert answer.usage.prompt_tokens == len(alone[0]["prompt_ids"])
    drawn = ask.completions.create(model="tiny", n=2, logprobs=2, **KINDS[2])
    assert drawn.choices[0].text == alone[2]["text"]
    assert len(drawn.choices[1].logprobs.token_logprobs) == 24


def test_a_chat_and_its_scores(ask, alone):
    answer = ask.chat.completions.create(messages=MESSAGES, logprobs=True, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == alone[10]["text"]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == 24


def test_calls_of_tools_whole_and_streamed():
    """A script stands for the base: a small one writes no calls."""
    text = (
        '<think>\nHm.</think>\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    app = scripted_app(Scripted(text, 3), Style("hermes", ("<think>", "</think>")))
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}

    async def asked():
        transport = httpx.ASGITransport(app=app)
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=http
        ) as client:
            whole = await client.chat.completions.create(**body)
            async with client.chat.completions.stream(**body) as stream:
                events = [event.type async for event in stream]
                return whole, await stream.get_final_completion(), events

    *answers, events = asyncio.run(asked())
    for answer in answers:
        (choice,) = answer.choices
        calls = [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls
        ]
        assert calls == [("f", '{"a": "b"}'), ("f", "{}")]
        assert (choice.finish_reason, choice.message.reasoning_content) == ("tool_calls", "Hm.")
    assert events.count("tool_calls.function.arguments.done") == 2


class Point(pydantic.BaseModel):
    # Without it a base this small adds properties until its tokens are used up.
    model_config = pydantic.ConfigDict(extra="forbid")
    x: int = pydantic.Field(ge=0, le=99)
    kind: Literal["a", "b"]


def test_answers_are_parsed(ask):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "temperature": 1}
    for seed in range(3):
        answer = ask.chat.completions.parse(response_format=Point, seed=seed, **body)
        assert isinstance(answer.choices[0].message.parsed, Point)
    with ask.chat.completions.stream(response_format=Point, seed=3, **body) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Point)


def test_penalties(ask):
    def text(**penalties):
        answer = ask.chat.completions.create(messages=MESSAGES, **GREEDY, **penalties)
        return answer.choices[0].message.content

    texts = {text(), text(frequency_penalty=2.0), text(extra_body={"repetition_penalty": 1.3})}
    assert len(texts) == 3
    assert text(extra_body={"min_p": 0.5}) == text()
    with pytest.raises(openai.BadRequestError, match="frequency_penalty .* must lie in -2 .. 2"):
        text(frequency_penalty=3)


def test_a_loop_of_calls_that_must_be(ask):
    """A grammar forces the calls: so small a base writes none by itself."""
    tools = [openai.pydantic_function_tool(Point, name=name) for name in ("near", "far")]
    messages = list(MESSAGES[1:])
    for seed in range(3):
        answer = ask.chat.completions.create(
            **GREEDY | {"temperature": 1, "max_tokens": 150, "seed": seed},
            messages=messages,
            tools=tools[:1],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "near"
        point = Point.model_validate_json(call.function.arguments)
        # The template of the tests writes contents alone.
        said = {"role": "tool", "tool_call_id": call.id, "content": str(point.x)}
        messages = [*MESSAGES[1:], message.model_dump(exclude_none=True), said]


def test_responses_whole_and_streamed(ask):
    body = {"model": "tiny", "input": "def area(", "max_output_tokens": 200, "temperature": 1}
    answer = ask.responses.parse(text_format=Point, extra_body={"seed": 3}, **body)
    assert isinstance(answer.output_parsed, Point)
    assert answer.status == "completed"
    with ask.responses.stream(text_format=Point, extra_body={"seed": 3}, **body) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Point)
    (call,) = ask.responses.create(
        tools=[{"type": "function", "name": "f", "parameters": Point.model_json_schema()}],
        tool_choice={"type": "function", "name": "f"},
        **body,
    ).output
    assert (call.type, call.name) == ("function_call", "f")
    Point.model_validate_json(call.arguments)


def test_responses_with_thinking_and_calls():
    text = '<think>\nHm.</think>\nYes.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
    app = scripted_app(Scripted(text + "</tool_call>", 3), Style("hermes", ("<think>", "</think>")))
    body = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **TOOLS[0]["function"]}]}

    async def asked():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=http
        ) as client:
            whole = await client.responses.create(**body)
            async with client.responses.stream(**body) as stream:
                events = [event.type async for event in stream]
                return whole, await stream.get_final_response(), events

    *answers, events = asyncio.run(asked())
    for answer in answers:
        thought, message, call = answer.output
        assert thought.content[0].text == "Hm."
        assert message.content[0].text == answer.output_text == "Yes."
        assert (call.name, call.arguments, call.status) == ("f", '{"a": 1}', "completed")
    assert events.count("response.function_call_arguments.done") == 1
    assert events.count("response.output_item.done") == 3


def test_streams(ask, alone):
    with ask.completions.create(prompt=AREA, stream=True, **GREEDY) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == alone[0]["text"]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = ask.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY, **usage)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == alone[10]["text"]
    assert last.usage.completion_tokens == 24


def test_a_stream_that_is_closed_early_frees_its_slot(server, ask):
    body = {"model": "tiny", "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    chunks = ask.completions.create(prompt=AREA, stream=True, **body)
    next(iter(chunks))
    chunks.close()
    assert server.becomes("num_requests_running", 0)


def test_many_at_once(server, alone):
    async def texts():
        async with openai.AsyncOpenAI(**options(server)) as client:
            answers = [client.completions.create(prompt=AREA, **GREEDY) for _ in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    async def streamed():
        async with openai.AsyncOpenAI(**options(server)) as client:
            chunks = await client.completions.create(prompt=AREA, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in chunks])

    assert asyncio.run(texts()) == [alone[0]["text"]] * 12
    assert asyncio.run(streamed()) == alone[0]["text"]


def test_refusals_are_the_client_s_own_errors(server, ask):
    needed = pytest.raises(openai.AuthenticationError, match="a key is needed")
    with openai.OpenAI(**options(server, "another")) as stranger, needed:
        stranger.completions.create(prompt=AREA, **GREEDY)
    with pytest.raises(openai.NotFoundError, match='"gpt-4" does not exist here') as refused:
        ask.completions.create(prompt=AREA, model="gpt-4")
    assert refused.value.code == "model_not_found"
    documents = {"documents": [{"text": "a"}]}
    with pytest.raises(openai.BadRequestError, match="documents: .* no place for it") as refused:
        ask.chat.completions.create(messages=MESSAGES, extra_body=documents, **GREEDY)
    assert refused.value.param == "documents"


def test_a_full_queue_is_a_rate_limit(server, ask):
    # Four run and sixteen may wait, so that two such requests are more than there is room for.
    body = {"model": "tiny", "max_tokens": 480, "n": 16, "extra_body": {"ignore_eos": True}}
    limited = pytest.raises(openai.RateLimitError, match="too many requests are waiting")
    with ask.completions.create(prompt=AREA, stream=True, **body), limited:
        ask.completions.create(prompt=AREA, **body)
    assert server.becomes("num_requests_running", 0)


def test_langchain_invokes_streams_and_batches(server, alone):
    langchain = pytest.importorskip("langchain_openai", reason="pip install -e '.[clients]'")
    asked = {"model": "tiny", "max_tokens": 24, "temperature": 0, **options(server)}
    llm, chat = langchain.OpenAI(**asked), langchain.ChatOpenAI(**asked)
    assert llm.invoke(AREA) == alone[0]["text"]
    assert llm.batch([AREA, CLOSE])[0] == alone[0]["text"]
    assert "".join(llm.stream(AREA)) == alone[0]["text"]

    messages = [(message["role"], message["content"]) for message in MESSAGES]
    answer = chat.invoke(messages)
    assert answer.content == alone[10]["text"]
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(messages, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == alone[10]["text"]
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert sum(usage["output_tokens"] for usage in told) == 24
    drawn = langchain.ChatOpenAI(**asked | {"max_tokens": 300, "temperature": 1, "seed": 1})
    assert isinstance(drawn.with_structured_output(Point).invoke(messages), Point)
    (call,) = drawn.bind_tools([Point], tool_choice="Point").invoke(messages).tool_calls
    assert Point(**call["args"])
