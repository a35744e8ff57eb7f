"""What a base writes is split into calls, thinking and text, in pieces of every size."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.serving import answering
from clover_jax.serving.calls import FORMATS, Splitter, Style, style_of
from clover_jax.serving.requests import Splitting
from tests.serving.asking import Scripted, scripted_app

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "sure": {"type": ["boolean", "null"]},
        "spots": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
THINK = ("<think>", "</think>")
OSLO = '{"city": "Oslo"}'
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
HARMONY_CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + OSLO + "<|call|>"
)


def parts(style, text, size=None, is_thinking=False, most_calls=None, tools=TOOLS):
    """Return what a client has put together of an answer in pieces: content, thinking, calls."""
    splitter = Splitter(style, tools, is_thinking, most_calls)
    size = size or len(text) or 1
    new = [part for at in range(0, len(text), size) for part in splitter.push(text[at : at + size])]
    content, thinking, calls, ids = "", "", {}, {}
    for part in [*new, *splitter.end()]:
        if part.kind == "content":
            content += part.text
        elif part.kind == "reasoning":
            thinking += part.text
        else:
            name, arguments = calls.get(part.call, (part.name, ""))
            calls[part.call] = (name, arguments + part.text)
            ids.setdefault(part.call, part.id)
    assert splitter.num_calls >= len(calls)
    assert len(set(ids.values())) == len(ids)
    assert all(id_.isalnum() and len(id_) == 9 for id_ in ids.values())
    assert list(calls) == list(range(len(calls)))
    return content, thinking, list(calls.values())


# Format, text, content, calls.
CALLS = [
    ("hermes", "Hello\n", "Hello\n", []),
    ("hermes", HERMES, "", [("weather", OSLO)]),
    ("hermes", f"Let me see.\n{HERMES}\n", "Let me see.", [("weather", OSLO)]),
    ("hermes", f"{HERMES}\n{HERMES}", "", [("weather", OSLO)] * 2),
    ("hermes", f"a {HERMES} b", "ab", [("weather", OSLO)]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", "{}")]),
    # Other orders and forms of keys, and none of the arguments.
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "",
     [("weather", OSLO)]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now"}}</tool_call>', "",
     [("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        "",
        [("weather", OSLO)],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": {"a": "}"}}</tool_call>.', ".",
     [("now", "{}")]),
    # A name that the tools do not have is for the client to answer.
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    # Brackets, quotes and marks within a text.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}\\"{</tool_call>", "b": [{}]}}</tool_call>',
        "",
        [("f", '{"a": "}\\"{</tool_call>", "b": [{}]}')],
    ),
    # A bracket too few, and an answer that was cut.
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call> b', "b", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    # What is no call stays.
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", "a <tool_call>", "a <tool_call>", []),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", "<tool_call>{b}</tool_call> c", "<tool_call>{b}</tool_call> c", []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ("hermes", f"<tool_call>no {HERMES}", "<tool_call>no", [("weather", OSLO)]),
    # Qwen3-Coder: values by the types of the schema.
    (
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\nN\n</parameter>\n<parameter=days>"
        "\n3\n</parameter>\n<parameter=sure>\nTrue\n</parameter>\n<parameter=spots>\nnull\n"
        "</parameter>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"city": "Oslo\\nN", "days": 3, "sure": true, "spots": null, "x": "7"}')],
    ),
    # Without the first mark, and a tag that does not end.
    ("hermes", "See:\n<function=weather>\n<parameter=days>\nfew\n<parameter=city>\nA</parameter>"
     "</function>\n</tool_call>", "See:", [("weather", '{"days": "few", "city": "A"}')]),
    ("hermes", "<tool_call><function=now></function></tool_call>", "", [("now", "{}")]),
    ("hermes", "<function=weather><parameter=city>\nOs", "", [("weather", '{"city": "Os')]),
    ("hermes", "a <function= b>", "a <function= b>", []),
    ("llama", LLAMA, "", [("weather", OSLO)]),
    ("llama", f"<|python_tag|>{LLAMA}", "", [("weather", OSLO)]),
    ("llama", f"{LLAMA}; {LLAMA}\n{LLAMA}", "", [("weather", OSLO)] * 3),
    ("llama", f"{LLAMA}; and", "; and", [("weather", OSLO)]),
    ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama", '{"a": {"b": 1}} is JSON', '{"a": {"b": 1}} is JSON', []),
    ("llama", f"It is {LLAMA}", f"It is {LLAMA}", []),
    ("llama", "<|python_tag|>f.call(a=1)", "<|python_tag|>f.call(a=1)", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"arguments": {}, '
        '"name": "now"}]',
        "",
        [("weather", OSLO), ("now", "{}")],
    ),
    ("mistral", f"Yes.[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{{}}",
     "Yes.", [("weather", OSLO), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather{OSLO}", "", [("weather", OSLO)]),
    ("mistral", "[TOOL_CALLS]of the day: {}", "[TOOL_CALLS]of the day: {}", []),
    ("mistral", "[TOOL_CALLS]now", "[TOOL_CALLS]now", []),
    ("phi", 'So <|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
     "So", [("weather", OSLO)]),
    ("phi", 'functools[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', "",
     [("now", "{}")] * 2),
    ("phi", "import functools; functools[5]", "import functools; functools[5]", []),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Os{l,o:"<|"|>,days:3,spots:[<|"|>a<|"|>,{b:false}]}'
        "<tool_call|>",
        "",
        [("weather", '{"city": "Os{l,o:\\"", "days": 3, "spots": ["a", {"b": false}]}')],
    ),
    ("gemma", "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"
     "<start_function_call>call:now{}<end_function_call>", "", [("weather", OSLO), ("now", "{}")]),
    ("gemma", f"<|tool_call>call:weather{OSLO}<tool_call|>", "", [("weather", OSLO)]),
    ("gemma", "<|tool_call>call:now{a<tool_call|>", "<|tool_call>call:now{a<tool_call|>", []),
    ("harmony", "<|channel|>final<|message|>Hi", "Hi", []),
    ("harmony", HARMONY_CALL, "", [("weather", OSLO)]),
    # The mark that ends the answer is not part of its text.
    ("harmony", HARMONY_CALL.removesuffix("<|call|>"), "", [("weather", OSLO)]),
    (
        "harmony",
        f" to=functions.now<|channel|>commentary json<|message|>{{}}<|call|><|start|>assistant"
        f"{HARMONY_CALL}",
        "",
        [("now", "{}"), ("weather", OSLO)],
    ),
    ("harmony", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}",
     "I look.", [("weather", OSLO)]),
    ("harmony", "No marks", "No marks", []),
    ("harmony", "<|channel|>fin", "<|channel|>fin", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CALLS)
def test_calls_are_the_same_in_pieces_of_any_size(style, text, content, calls):
    for size in (None, 1, 2, 3, 5, 7, 11):
        assert parts(Style(style), text, size) == (content, "", calls), size


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_tools_has_no_calls(name):
    texts = [text for style, text, *_ in CALLS if style == name != "harmony"]
    for text in texts:
        assert parts(Style(name), text, 3, tools=[]) == (text, "", [])


# Style, whether the prompt has opened the thinking, text, content, thinking, number of calls.
THOUGHTS = [
    (Style(None, THINK), False, "<think>\nHm.\n</think>\n\nYes.\n", "Yes.\n", "Hm.", 0),
    (Style(None, THINK), True, "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", 0),
    (Style(None, THINK), False, "\n <b> is a tag", "\n <b> is a tag", "", 0),
    (Style(None, THINK), False, "a <think>b</think>", "a <think>b</think>", "", 0),
    (Style(None, THINK), True, "Hm. So", "", "Hm. So", 0),
    (Style(None, THINK), False, "<think></think>Yes.", "Yes.", "", 0),
    (Style("hermes", THINK), False, f"<think>a {HERMES}</think>\n{HERMES}", "", f"a {HERMES}", 1),
    (Style("llama", THINK), True, f"a</think>\n{LLAMA}", "", "a", 1),
    (Style("mistral", ("[THINK]", "[/THINK]")), False, "[THINK]a[/THINK]b", "b", "a", 0),
    (
        *(Style("gemma", ("<|channel>thought", "<channel|>")), False),
        *("<|channel>thought\na<channel|>b", "b", "a", 0),
    ),
    (
        *(Style("harmony"), False),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        f"<|end|><|start|>assistant{HARMONY_CALL}",
        *("", "a\nb", 1),
    ),
    (
        *(Style("harmony"), False),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        *("b", "a", 0),
    ),
]


@pytest.mark.parametrize(("style", "is_thinking", "text", "content", "thinking", "count"), THOUGHTS)
def test_what_was_thought_is_split_off(style, is_thinking, text, content, thinking, count):
    for size in (None, 1, 2, 3, 5, 7):
        split = parts(style, text, size, is_thinking)
        assert split == (content, thinking, [("weather", OSLO)] * count), size


def test_arguments_come_as_they_are_written():
    splitter = Splitter(Style("hermes"), TOOLS)
    named = splitter.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert [(part.name, part.text) for part in named] == [("weather", ""), (None, '{"ci')]
    assert [part.text for part in splitter.push('ty": "Os')] == ['ty": "Os']
    assert [part.text for part in splitter.push('lo"}}')] == ['lo"}']


def test_further_calls_are_left_out_where_one_is_wanted():
    text = f"a\n{HERMES}\n{HERMES}"
    assert parts(Style("hermes"), text, 4, most_calls=1) == ("a", "", [("weather", OSLO)])


# Any text of bits of all formats, cut anywhere.
BITS = sorted(
    {mark for one in FORMATS.values() for mark in (*one.begins, *one.ends, *one.others)}
    | {*THINK, *("{", "}", "[", "]", '"', "\\", " ", "\n", ",", ";", "a", "to=f ", "call:now{")}
    | {'{"name": "now", "arguments": {', "<function=now>", "<parameter=a>", "</parameter>", LLAMA}
)


@given(
    name=st.sampled_from([None, *FORMATS]),
    bits=st.lists(st.sampled_from(BITS), max_size=12),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_no_text_depends_on_its_pieces_or_is_lost(name, bits, cuts):
    text = "".join(bits)
    whole = parts(Style(name, THINK), text)
    splitter, new, at = Splitter(Style(name, THINK), TOOLS), [], 0
    for cut in [*cuts, len(text)]:
        new += splitter.push(text[at : at + cut])
        at += cut
    new += splitter.end()
    for kind, joined in zip(("content", "reasoning"), whole[:2], strict=True):
        assert "".join(part.text for part in new if part.kind == kind) == joined
    calls = {}
    for part in new:
        if part.kind == "call":
            calls[part.call] = calls.get(part.call, "") + part.text
    assert list(calls.values()) == [arguments for _, arguments in whole[2]]
    # Where there is no call, only white space and marks of thinking are missing.
    if not whole[2] and name != "harmony":
        left = whole[1] + whole[0]
        for mark in ("", *THINK):
            text = text if text.split() == left.split() else text.replace(mark, "", 1)
        assert "".join(left.split()) == "".join(text.split())


TEMPLATES = [
    ("{{ '<tool_call>' }} <think> </think>", Style("hermes", THINK)),
    ("<tool_call><function=f>", Style("hermes")),
    ("[TOOL_CALLS] [ARGS] [/THINK]", Style("mistral", ("[THINK]", "[/THINK]"))),
    ("<|python_tag|>", Style("llama")),
    ("Environment: ipython", Style("llama")),
    ("<|start|><|channel|><|message|>", Style("harmony")),
    ("<|tool_call> <channel|>", Style("gemma", ("<|channel>thought", "<channel|>"))),
    ("<start_function_call>", Style("gemma")),
    ("<|tool|>", Style("phi")),
    ("<|im_start|>", Style()),
]


@pytest.mark.parametrize(("template", "style"), TEMPLATES)
def test_a_template_tells_the_format_and_a_flag_goes_before_it(template, style):
    assert style_of(template) == style
    assert style_of(template, "none") == Style()
    assert style_of(template, "llama") == style._replace(calls="llama")
    assert not style.calls or set(FORMATS[style.calls].begins) <= set(style.marks)


def test_tools_of_any_shape_are_taken():
    for tool in (
        {},
        {"function": 5},
        {"function": {"name": ["f"]}},
        {"name": "f", "parameters": 5},
    ):
        assert parts(Style("hermes"), HERMES, tools=[tool])[2] == [("weather", OSLO)]
    odd = {"properties": {"city": 5, "days": {"type": 5, "anyOf": [7]}}}
    tool = {"name": "weather", "parameters": odd}
    text = "<function=weather><parameter=city>1</parameter><parameter=days>2</parameter></function>"
    ((_, arguments),) = parts(Style("hermes"), text, tools=[tool])[2]
    assert json.loads(arguments) == {"city": "1", "days": "2"}


# A server whose scheduler hands out texts that are written here, in pieces.
CHAT = {"messages": [{"role": "user", "content": "Oslo?"}], "tools": TOOLS}


def answer(scheduler, body, style, heard=None):
    """Return the bytes of the answer to a chat; heard: gets them as they come."""
    app = scripted_app(scheduler, style)
    written = []

    async def ask():
        content = json.dumps(CHAT | body).encode()
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            written.append(message.get("body", b""))
            if heard is not None:
                heard(written[-1])

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        scope |= {"headers": headers, "query_string": b"", "client": ("127.0.0.1", 1)}
        await app(scope, receive, send)

    asyncio.run(ask())
    return b"".join(written)


def message(text, style, reason="eos", **body):
    """Return the message and the finish reason of an answer, which a stream must have too."""
    whole = json.loads(answer(Scripted(text, 4, reason), body, style))["choices"][0]
    for size in (1, 3, 50):
        stream = answer(Scripted(text, size, reason), body | {"stream": True}, style).decode()
        joined, finish = {"content": None}, None
        for line in stream.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            finish = choice["finish_reason"] or finish
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    joined[key] = (joined.get(key) or "") + value
                    continue
                calls = joined.setdefault(key, [])
                for call in value:
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "type": call["type"], "function": {}})
                    for name, said in call["function"].items():
                        function = calls[call["index"]]["function"]
                        function[name] = function.get(name, "") + said
        expected = whole["message"] | {"content": whole["message"]["content"] or ""}
        assert without_ids(joined | {"refusal": None}) == without_ids(expected)
        assert finish == whole["finish_reason"]
    return whole["message"], whole["finish_reason"]


def without_ids(said):
    calls = [call | {"id": None} for call in said.get("tool_calls", [])]
    return said | ({"tool_calls": calls} if calls else {})


def test_an_answer_has_its_calls_apart_and_says_so():
    said, reason = message(f"{HERMES}\n{HERMES}", Style("hermes"))
    ids = [call["id"] for call in said["tool_calls"]]
    call = {"type": "function", "function": {"name": "weather", "arguments": OSLO}}
    calls = [call | {"id": id_} for id_ in ids]
    expected = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    assert (said, reason) == (expected, "tool_calls")
    # What a limit cuts has no call to answer yet.
    assert message(HERMES[:60], Style("hermes"), "length")[1] == "length"
    said, reason = message(f"Yes.\n{HERMES}\n{HERMES}", Style("hermes"), parallel_tool_calls=False)
    assert (said["content"], len(said["tool_calls"]), reason) == ("Yes.", 1, "tool_calls")
    plain = {"role": "assistant", "content": HERMES, "refusal": None}
    for body, style in (
        ({"tools": None}, "hermes"),
        ({"tool_choice": "none"}, "hermes"),
        ({}, None),
    ):
        assert message(HERMES, Style(style), **body) == (plain, "stop")


def test_an_answer_has_its_thinking_apart_or_not_at_all():
    text, style = f"<think>\nHm.\n</think>\n\n{HERMES}", Style("hermes", THINK)
    said, reason = message(text, style)
    assert (said["reasoning_content"], said["content"], reason) == ("Hm.", None, "tool_calls")
    said, _ = message(text, style, include_reasoning=False, tools=None)
    assert said == {"role": "assistant", "content": HERMES, "refusal": None}


def test_marks_of_the_format_are_text_though_special():
    scheduler = Scripted("a", 1)
    answer(scheduler, {}, Style("mistral"))
    assert scheduler.asks[0].shown == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


def test_a_prompt_that_ends_in_thinking_begins_the_answer_with_it():
    splitting = Splitting(Style(None, THINK))
    thought = splitting.splitter("assistant\n<think>\n").push("a</think>b")
    assert [part.kind for part in thought] == ["reasoning", "content"]
    said = splitting.splitter("assistant\n<think>\n\n</think>\n\n").push("a</think>b")
    assert [part.kind for part in said] == ["content"]


def test_a_stream_that_waits_has_comments(monkeypatch):
    monkeypatch.setattr(answering, "COMMENT_SECONDS", 0.001)
    begins, comments = asyncio.Event(), []

    def heard(body):
        comments.extend([body] * body.startswith(b":"))
        if len(comments) == 3:
            begins.set()

    stream = answer(Scripted("Hi", 1, waits=begins), {"stream": True}, Style(), heard)
    assert stream.startswith(b": waiting\n\n" * 3)
    assert stream.endswith(b"data: [DONE]\n\n")
