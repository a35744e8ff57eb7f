"""Messages reach the chat template whole, and what is learned includes calls."""

import json

import numpy as np
import pytest

from clover_jax.data.chat import encode_prompt, encode_record, render_chat
from clover_jax.data.chat_templates import RowTemplate, template_notice
from clover_jax.data.forms import parse_row
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.data.family_templates import (
    CHANNELS,
    DOCUMENTS,
    FAMILIES,
    GEMMA,
    GENERATION,
    HERMES,
    PLAIN_ROLES,
    THINKING,
)
from tests.tiny_tokenizers import save_byte_level

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(id_="c1", **arguments):
    return {"id": id_, "type": "function", "function": {"name": "weather", "arguments": arguments}}


ASK = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call(city="Oslo")]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "4 degrees"}
ANSWER = {"role": "assistant", "content": "It is 4 degrees."}
TWO_CALLS = {**CALL, "tool_calls": [call(city="Oslo"), call("c2", city="Rome")]}
THEN = {"role": "user", "content": "And in Rome?"}
AGAIN = {"role": "assistant", "content": "", "tool_calls": [call("c2", city="Rome")]}
OTHER = {**RESULT, "tool_call_id": "c2"}
ROWS = {
    "a call": [ASK, CALL, RESULT, ANSWER],
    "null content": [ASK, {**CALL, "content": None}, RESULT, ANSWER],
    "absent content": [ASK, {k: v for k, v in CALL.items() if k != "content"}, RESULT, ANSWER],
    "two calls": [ASK, TWO_CALLS, RESULT, {**RESULT, "tool_call_id": "c2"}, ANSWER],
    "a call with text": [ASK, {**CALL, "content": "Let me look."}, RESULT, ANSWER],
    "a call at the end": [ASK, ANSWER, ASK, CALL],
    "thinking": [ASK, {**ANSWER, "reasoning_content": "easy"}, ASK, {**ANSWER, "thinking": "so"}],
    "thinking and a call": [ASK, {**CALL, "reasoning_content": "I must ask"}, RESULT, ANSWER],
    "several turns": [ASK, ANSWER, ASK, ANSWER, ASK, ANSWER],
    "several turns with calls": [ASK, CALL, RESULT, ANSWER, THEN, AGAIN, OTHER, {**ANSWER}],
    "several turns of two answers": [ASK, ANSWER, THEN, {**ANSWER, "content": "Rome: 9."}],
}


REFUSED = {
    ("llama", "two calls"),
    ("llama", "a call with text"),
    ("mistral", "a call with text"),
    ("channels", "a call with text"),
    # Its calls are where the content is null, which is a key that transformers drops.
    *(("deepseek", row) for row, messages in ROWS.items() if "tool_calls" in str(messages)),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("byte_level")))


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


def learned(row, tokenizer):
    """Return the texts of the runs of tokens that are learned."""
    (record,) = parse_row(row, "f")
    encoded = encode_record(record, tokenizer, 300)
    runs = np.split(encoded.tokens, np.flatnonzero(np.diff(encoded.loss_mask)) + 1)
    begins = bool(encoded.loss_mask[0])
    return [tokenizer.decode(run) for i, run in enumerate(runs) if (i % 2 == 0) == begins]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", ROWS)
def test_a_conversation_is_rendered_as_transformers_renders_it(tokenizer, family, row):
    with_template(tokenizer, FAMILIES[family])
    messages = ROWS[row]
    try:
        expected = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    except Exception:  # a template that does not want the row
        expected = None
    (record,) = parse_row({"messages": messages, "tools": TOOLS}, "f")
    if (family, row) in REFUSED:
        # What transformers renders without a call or its text, or not at all.
        with pytest.raises(UserError, match="leaves out the (calls|text next to)|refuses the conv"):
            render_chat(record, tokenizer)
        return
    text, spans = render_chat(record, tokenizer)
    assert text == expected
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)
    for message in messages[:-1]:
        for one in message.get("tool_calls", ()):
            assert one["function"]["arguments"]["city"] in "".join(text[a:b] for a, b in spans)


@pytest.mark.parametrize(
    "template, row, expected",
    [
        (PLAIN_ROLES, "a call", ['<call>weather {"city": "Oslo"}</call></s>']),
        (HERMES, "null content", [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call></s>'
        ]),
        (THINKING, "thinking and a call", [
            '<think>\nI must ask\n</think>\n\n<tool_call>weather{"city": "Oslo"}</tool_call></s>'
        ]),
        (GENERATION, "two calls", [
            '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'
            '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call></s>'
        ]),
        (CHANNELS, "a call", [
            ' to=weather<channel>commentary<message>{"city": "Oslo"}<call>'
        ]),
    ],
)  # fmt: skip
def test_a_call_is_learned(tokenizer, template, row, expected):
    with_template(tokenizer, template)
    assert learned({"messages": ROWS[row]}, tokenizer)[:-1] == expected


@pytest.mark.parametrize("family", ["mistral", "hermes", "plain roles"])
def test_answers_of_several_turns_with_calls_are_learnt_and_nothing_else(tokenizer, family):
    with_template(tokenizer, FAMILIES[family])
    row = {"messages": ROWS["several turns with calls"], "tools": TOOLS}
    for run, city in zip(learned(row, tokenizer)[::2], ("Oslo", "Rome"), strict=True):
        assert city in run
        assert "4 degrees" not in run
    for run in learned(row, tokenizer)[1::2]:
        assert run == "It is 4 degrees.</s>"
    assert len(learned(row, tokenizer)) == 4


def test_marks_of_a_template_itself_are_what_is_learned(tokenizer):
    with_template(tokenizer, GENERATION)
    for messages in ROWS.values():
        (record,) = parse_row({"messages": messages}, "f")
        ours = encode_record(record, tokenizer, 300)
        theirs = tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True
        )
        assert ours.tokens.tolist() == theirs["input_ids"]
        assert ours.loss_mask.astype(int).tolist() == theirs["assistant_masks"]


def test_a_template_without_calls_is_refused_rather_than_taught_to_say_nothing(tokenizer):
    with_template(tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}</s>"
                  "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip
    with pytest.raises(UserError, match="f: the base's chat template leaves out the calls in answ"):
        learned({"messages": ROWS["null content"]}, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="f: the model has no chat template, without which tool_ca"):
        learned({"messages": ROWS["a call"]}, tokenizer)


SKIPPING = "if m.role in ['user', 'assistant'] %}"


@pytest.mark.parametrize("role", ["developer", "tool", "critic"])
def test_roles_are_the_templates_affair_and_one_that_it_skips_is_refused(tokenizer, role):
    row = {"messages": [{"role": role, "content": "be brief"}, ASK, ANSWER]}
    with_template(tokenizer, PLAIN_ROLES)
    (record,) = parse_row(row, "f")
    assert render_chat(record, tokenizer)[0].startswith(f"[{role}]be brief[user]Weather")
    loop = "{% for m in messages %}"
    with_template(tokenizer, PLAIN_ROLES.replace(loop, loop.replace("%}", SKIPPING)))
    for read, messages in ((learned, row["messages"]), (prompt_text, row["messages"][:2])):
        with pytest.raises(UserError, match=f'leaves out message 0, of the role "{role}"'):
            read({"messages": messages}, tokenizer)


def prompt_text(row, tokenizer):
    return tokenizer.decode(encode_prompt(parse_prompt(row, 0, "f"), tokenizer, 300))


def test_prompts_are_rendered_by_the_same_path(tokenizer):
    for template in (PLAIN_ROLES, HERMES, THINKING, GENERATION):
        with_template(tokenizer, template)
        messages = ROWS["thinking and a call"][:3]
        expected = tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
        )
        assert prompt_text({"messages": messages, "tools": TOOLS}, tokenizer) == expected


def test_variables_of_a_row_reach_the_template(tokenizer):
    with_template(tokenizer, THINKING)
    question = {"question": "Why?", "enable_thinking": False}
    assert prompt_text(question, tokenizer).endswith("<assistant>\n<think>\n\n</think>\n\n")
    more = {"question": "Why?", "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_text(more, tokenizer) == prompt_text(question, tokenizer)
    with_template(tokenizer, DOCUMENTS)
    documents = [{"title": "T", "text": "D"}]
    for given in (documents, json.dumps(documents), [json.dumps(documents[0])]):
        assert "<doc>T: D</doc>" in prompt_text({"question": "?", "documents": given}, tokenizer)
    with_template(tokenizer, CHANNELS)
    assert "Reasoning: high" in prompt_text({"turns": ["?"], "reasoning_effort": "high"}, tokenizer)


def test_arguments_in_json_text_are_read_as_servers_read_them(tokenizer):
    with_template(tokenizer, PLAIN_ROLES)
    as_text = [ASK, {**CALL, "tool_calls": [call()]}, RESULT, ANSWER]
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Oslo"}'
    assert learned({"messages": as_text}, tokenizer) == learned(
        {"messages": ROWS["a call"]}, tokenizer
    )
    for calls in ([], None):
        assert (
            "tool_calls"
            not in parse_row({"messages": [{**ANSWER, "tool_calls": calls}]}, "f")[0].messages[0]
        )


PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]


def test_parts_are_what_a_template_makes_of_them_or_lines(tokenizer):
    messages = [{"role": "user", "content": PARTS}]
    with_template(tokenizer, GEMMA)
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert (
        RowTemplate(tokenizer, "f").render(messages, False)
        == expected
        == "<s><turn>user\nab<end>\n"
    )
    with_template(tokenizer, PLAIN_ROLES)
    assert RowTemplate(tokenizer, "f").render(messages, False) == "[user]a \nb"


@pytest.mark.parametrize(
    "messages, message",
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
         r'messages\[0\].content\[0\] has the type "image_url"; only text parts are supported'),
        ([{"role": "user", "content": {"a": 1}}], r'messages\[0\].content must be text, not {"a"'),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content is missing; expected"),
        ([{"role": "user", "content": "a\ud83d"}], "which holds half a character"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\].role must be a name, user"),
        ([{"from": ["user"], "value": "a"}], r'messages\[0\] is from \["user"\]; it may be from'),
        ([{"from": "user", "value": "a", "content": "b"}], "has value and content; give one"),
        ([{**CALL, "tool_calls": "f()"}], r"tool_calls must be an object with a function's name"),
        ([{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
         r"tool_calls\[0\].function.arguments is a text that is not JSON"),
        ({"role": "user"}, "messages must be a list of messages, not"),
        ("hello", "messages is a text that is not JSON"),
        (["hello"], r"messages\[0\] must be an object with role and content"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read_are_refused_in_one_line(messages, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_row({"messages": messages}, "f:3")
    assert str(raised.value).startswith("f:3: ")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("tools", {"a": 1}, "f:3: tools must be a list of objects"),
        ("tools", "[", "f:3: tools is a text that is not JSON"),
        ("documents", [5], "f:3: documents must be a list of objects"),
        ("chat_template_kwargs", {"messages": []}, "f:3: chat_template_kwargs must be an object"),
    ],
)
def test_variables_that_cannot_be_read_are_refused(key, value, message):
    with pytest.raises(UserError, match=message):
        parse_row({"messages": [ASK, ANSWER], key: value}, "f:3")


def test_what_a_template_does_not_read_is_named_with_its_number(tokenizer):
    with_template(tokenizer, GENERATION)
    rows = [parse_row({"messages": messages, "tools": TOOLS}, "f")[0] for messages in ROWS.values()]
    notice = template_notice(rows, tokenizer)
    assert notice.startswith(
        'the chat template does not read "tools" (11), "name" (9), "tool_call_id" (9)'
    )
    with_template(tokenizer, MISTRAL_NAMES)
    assert template_notice(rows[:1], tokenizer) is None
    with_template(tokenizer, THINKING)
    assert "reasoning_content" not in (template_notice(rows, tokenizer) or "")


def test_what_stands_before_the_question_or_within_parts_is_named(tokenizer):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    messages = [ANSWER, {"role": "user", "content": [part]}, ANSWER]
    (record,) = parse_row({"messages": messages}, "f")
    with_template(tokenizer, PLAIN_ROLES)
    assert template_notice([record], tokenizer).startswith(
        'the chat template does not read "cache_control" (1): keys'
    )
    assert template_notice([record], tokenizer).endswith(
        "1 conversations begin with messages of the assistant, which are left out"
    )


MISTRAL_NAMES = "{{ tools }} {{ tool_calls }} {{ tool_call_id }} {{ name }}"


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("template", [PLAIN_ROLES, GENERATION, None])
def test_answers_are_learnt_as_the_row_marks_them(tokenizer, key, template):
    with_template(tokenizer, template)
    first, second = {**ANSWER, "content": "one"}, {**ANSWER, "content": "two"}
    for off, on in ((0, 1), (False, True), (0.0, None)):
        row = {"messages": [{**ASK, key: 0}, {**first, key: off}, ASK, {**second, key: on}]}
        (text,) = learned(row, tokenizer)
        assert text.startswith("two")
        assert "one" not in text
    # Not a token is learned, which is what the row wants.
    row = {"messages": [ASK, {**first, key: 0}]}
    assert not encode_record(parse_row(row, "f")[0], tokenizer, 300).loss_mask.any()


def test_marks_that_are_not_understood_are_refused_or_named(tokenizer):
    for value in (0.5, "no", [0]):
        with pytest.raises(
            UserError, match=r"f: messages\[1\].weight must be 0 or 1, false or true"
        ):
            parse_row({"messages": [ASK, {**ANSWER, "weight": value}]}, "f")
    with pytest.raises(
        UserError, match=r"messages\[1\] has marks that contradict each other: .*loss"
    ):
        parse_row({"messages": [ASK, {**ANSWER, "weight": 1, "loss": False}]}, "f")
    # Only the assistant is imitated.
    (record,) = parse_row({"messages": [{**ASK, "train": True}, {**ANSWER, "train": True}]}, "f")
    with_template(tokenizer, PLAIN_ROLES)
    assert 'does not read "train" (1)' in template_notice([record], tokenizer)


def test_a_completion_is_learnt_and_answers_in_its_prompt_are_not(tokenizer):
    with_template(tokenizer, PLAIN_ROLES)
    row = {"prompt": [ASK, ANSWER, ASK], "completion": [CALL, RESULT, {**ANSWER, "content": "x"}]}
    assert learned(row, tokenizer) == ['<call>weather {"city": "Oslo"}</call></s>', "x</s>"]
    assert learned({"prompt": "a", "completion": "b"}, tokenizer) == ["b</s>"]
