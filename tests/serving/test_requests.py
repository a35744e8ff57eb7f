"""Bodies become asks or refusals; the queue takes clients in turn; Prometheus reads the rows."""

import asyncio
import json

import numpy as np
import pytest
from starlette.requests import Request

from clover_jax.decoding.requests import Generation
from clover_jax.decoding.row_state import Turn, TurnProgress
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.serving.body import ApiError, parse_object, read_object
from clover_jax.serving.metrics import Metrics
from clover_jax.serving.requests import Served, read_chat, read_completion
from clover_jax.serving.responses_api import read_response
from clover_jax.serving.scheduler import FairQueue

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


def test_max_completion_tokens_go_before_max_tokens_and_zero_shows_the_prompt_alone():
    assert chat(max_tokens=5, max_completion_tokens=7).asks[0].settings.max_new_tokens == 7
    assert chat(max_tokens=5).asks[0].settings.max_new_tokens == 5
    assert completion(top_k=-1).asks[0].settings.top_k == 0, "all"
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
    reading = SERVED._replace(template_words=frozenset({"tools", "enable_thinking"}))
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    prompt = read_chat(body, reading, "me").asks[0].prompt
    assert prompt.variables == {"tools": tools, "enable_thinking": False}
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert prompt.messages[1:] == ({"role": "assistant", "tool_calls": [read]}, result)
    with pytest.raises(ApiError, match="the model's chat template has no place for it"):
        read_chat(
            {"messages": MESSAGES, "tools": tools},
            SERVED._replace(template_words=frozenset()),
            "me",
        )


def test_items_of_a_response_s_input_are_messages():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "id": "rs_1"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "Yes.", "annotations": []},
            ]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
        ],
        "tools": [tool],
        "max_output_tokens": 7,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "include": ["reasoning.encrypted_content"],
        "store": True,
    }  # fmt: skip
    call = read_response(body, SERVED, "me")
    (ask,) = call.asks
    system, user, assistant, told = ask.prompt.messages
    assert (system["content"], user["content"]) == ("Be brief.", "Hi")
    assert assistant["content"] == "Yes."
    assert [one["id"] for one in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (told["role"], told["tool_call_id"], told["content"]) == ("tool", "c1", "5")
    assert ask.settings.max_new_tokens == 7
    assert json.loads(ask.settings.structured_outputs) == {"json": {"type": "object"}}
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert ask.prompt.variables["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "a", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_its_field(body, param):
    with pytest.raises(ApiError) as refused:
        read_response(body, SERVED, "me")
    assert (refused.value.status, refused.value.param) == (400, param)


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


# Values that a field cannot have, which is told by its name.
BAD_VALUES = {
    "prompt": ([], None, 5, [True], [-1], ["a", 1], [[]], "a\ud83d", ["a"] * 17),
    "max_tokens": ("5", 5.5, True, -1, 0),
    "temperature": ("hot", float("inf"), True),
    "top_k": (-2, 1.5),
    "n": (0, 129, 17),
    "seed": (2**63, 1.5),
    "stop": (5, ["a"] * 65),
    "logprobs": (True, 21),
    "stream": ("yes",),
    "stream_options": ({"include_usage": True},),
    "best_of": (2,),
    "user": (5,),
    "prediction": ({"content": "a"},),
    "ignore_eos": (1,),
    "logit_bias": ([5], {"5": 101}, {"5": "1"}, {"x": 1}, {"05": 1}),
    "min_tokens": (-1, 17),
    "repetition_penalty": ("1", True),
    "presence_penalty": ("much",),
    # What is not done here.
    "suffix": ("b",),
    "use_beam_search": (True,),
    "guided_regex": (["a+"],),
    "guided_choice": ("a",),
    "stop_token_ids": (5,),
    "skip_special_tokens": (1,),
    "include_stop_str_in_output": ("yes",),
}
BAD_COMPLETIONS = [({name: value}, name) for name, values in BAD_VALUES.items() for value in values]
BAD_COMPLETIONS.append(({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias"))
BAD_COMPLETIONS.append(({"stop": [""]}, "stop[0]"))
USER = {"role": "user"}
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "me", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {"messages": [*MESSAGES, USER | {"content": [{"type": "image_url"}]}]},
        "messages[1].content[0]",
    ),
    ({"messages": [USER | {"content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{", "guided_regex": None}, "guided_json"),
    ({"guided_regex": "a+", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(
    ("ask", "body", "param"),
    [*((completion, *case) for case in BAD_COMPLETIONS), *((chat, *case) for case in BAD_CHATS)],
)
def test_what_cannot_be_is_refused_by_its_field(ask, body, param):
    with pytest.raises(ApiError, match=param.partition("[")[0]) as refused:
        ask(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": Infinity}', "Infinity is not a number"),
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


def queue_of(*clients):
    queue = FairQueue()
    for number, client in enumerate(clients):
        queue.push(client, number)
    return queue


def drained(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_a_client_with_many_jobs_does_not_go_before_the_others():
    assert drained(queue_of("a", "a", "a", "b", "c", "b")) == [0, 3, 4, 1, 5, 2]


def test_a_job_that_is_withdrawn_is_never_taken():
    queue = queue_of("a", "b", "a")
    queue.discard("a", 0)
    queue.discard("b", 1)
    queue.discard("b", 1)  # a second time it is not there
    assert list(queue) == drained(queue) == [2]


def ended(accepted, num_tokens, reason="length"):
    """Return the end of an answer that a limit cut after some tokens."""
    ids = list(range(num_tokens))
    proposed = [5] * len(accepted)
    row = Generation(0, [1, 2], ids, accepted=accepted, proposed=proposed, finish_reason=reason)
    turn = Turn([1, 2], ids, "", accepted, len(accepted), row.tau, 0.0, reason)
    return TurnProgress(turn, row, [], True, 0)


def figures(metrics):
    lines = metrics.text().decode().splitlines()
    return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_one_and_the_accepted_tokens_a_draft_are_tau():
    metrics = Metrics("m")
    rng = np.random.default_rng(0)
    tokens = forwards = 0
    for _ in range(50):
        accepted = rng.integers(0, 5, size=rng.integers(1, 9)).tolist()
        # EOS, a limit or a stop string cuts within the last forward.
        whole = 1 + sum(accepted) + len(accepted)
        kept = int(rng.integers(whole - accepted[-1], whole + 1))
        metrics.ended(ended(accepted, kept), 1.0)
        tokens, forwards = tokens + kept - 1, forwards + len(accepted)

    scraped = figures(metrics)
    label = '{model_name="m"}'
    for prefix in ("vllm:", "clover_jax_"):
        drafts = scraped[f"{prefix}spec_decode_num_drafts_total{label}"]
        taken = scraped[f"{prefix}spec_decode_num_accepted_tokens_total{label}"]
        assert drafts == forwards
        assert scraped[f"{prefix}spec_decode_num_draft_tokens_total{label}"] == 5 * forwards
        assert 1 + taken / drafts == pytest.approx(tokens / forwards, rel=1e-15)
        # Of the tokens that were accepted each has a place.
        name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
        assert sum(value for key, value in scraped.items() if key.startswith(name)) == taken
    assert metrics.totals()["tau"] == round(tokens / forwards, 4)


def test_a_prompt_of_prefill_s_token_alone_and_plain_decoding_have_no_tau():
    metrics = Metrics("m")
    metrics.ended(ended([], 1), 1.0)
    assert metrics.totals() == {"answers": 1, "prompt_tokens": 2, "tokens": 1, "tau": None}
    metrics = Metrics("clover_jax_model", is_drafting=False)
    metrics.ended(ended([0, 0], 3), 1.0)
    assert metrics.totals()["tau"] is None
    # A name of ours in a label stays.
    assert figures(metrics)['vllm:num_requests_running{model_name="clover_jax_model"}'] == 0


def test_the_queue_is_asked_when_figures_are():
    metrics, waiting = Metrics("m"), [3]
    metrics.running.set_function(lambda: 2)
    metrics.waiting.set_function(lambda: waiting[0])
    waiting[0] = 4
    scraped = figures(metrics)
    assert scraped['vllm:num_requests_running{model_name="m"}'] == 2
    assert scraped['vllm:num_requests_waiting{model_name="m"}'] == 4


def test_endings_and_times_are_counted():
    metrics = Metrics("m")
    for reason in ("eos", "stop", "length"):
        metrics.ended(ended([1], 3, reason), 1.0)
    metrics.aborted()
    metrics.first_token.observe(0.2)
    metrics.later_tokens(4, 0.4)
    scraped = figures(metrics)
    for reason, count in {"stop": 2, "length": 1, "abort": 1}.items():
        name = f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}}'
        assert scraped[name] == count
    for name, value in {
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": pytest.approx(0.4),
        "time_to_first_token_seconds_count": 1,
    }.items():
        assert scraped[f'vllm:{name}{{model_name="m"}}'] == value


def test_fields_are_known_or_refused():
    chat = {"messages": MESSAGES}
    assert read_chat(chat | {"store": True, "metadata": {"a": "b"}}, SERVED, "me").asks
    for name in ("temprature", "thinking", "reasoning"):
        with pytest.raises(ApiError, match=f'unknown field "{name}"'):
            read_chat(chat | {name: 1}, SERVED, "me")
    for name, value in (("reasoning_effort", "high"), ("enable_thinking", True)):
        with pytest.raises(ApiError, match=f"{name}: the model's chat template has no place"):
            read_chat(chat | {name: value}, SERVED, "me")
        thinking = SERVED._replace(template_words=frozenset({name}))
        (ask,) = read_chat(chat | {name: value}, thinking, "me").asks
        assert ask.prompt.variables == {name: value}


def test_sampling_that_a_request_does_not_name_is_the_server_s():
    cool = SERVED._replace(usual=SamplingParams(0.6, 20, 0.9, repetition_penalty=1.05))
    (ask,) = read_chat({"messages": MESSAGES}, cool, "me").asks
    assert (ask.settings.temperature, ask.settings.top_k, ask.settings.top_p) == (0.6, 20, 0.9)
    assert (ask.settings.repetition_penalty, ask.settings.min_p) == (1.05, 0)
    (ask,) = read_chat({"messages": MESSAGES, "temperature": 0, "top_k": -1}, cool, "me").asks
    assert (ask.settings.temperature, ask.settings.top_k) == (0, 0)
