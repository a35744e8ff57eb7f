import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover_jax.data.forms import parse_row
from clover_jax.data.records import (
    Text,
    TokenRow,
    TokenTurns,
    content_hash,
    cut_text,
    data_hash,
    json_hash,
    split_by_hash,
)
from clover_jax.errors import UserError
from tests.data.conversations import conversation


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"text": "a"}, Text("f:1", "a")),
        ({"prompt": "a", "response": "b", "kind": "x"},
         conversation("f:1", (("user", "a"), ("assistant", "b")))),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
         conversation("f:1", (("system", "s"), ("user", "u")))),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
         conversation("f:1", (("user", "u"), ("assistant", "a")))),
        ({"prompt_ids": [1, 2], "output_ids": [3]}, TokenRow("f:1", (1, 2), (3,))),
    ],
)  # fmt: skip
def test_each_form_of_row_is_understood(row, expected):
    assert parse_row(row, "f:1") == [expected]


def test_turns_that_follow_each_other_are_one_record():
    row = {"index": 0, "prompt_ids": [[1], [1, 2, 3]], "output_ids": [[2], [4]], "text": ["", ""]}
    assert parse_row(row, "f") == [TokenTurns("f", (((1,), (2,)), ((3,), (4,))))]


def test_a_turn_that_rewrites_the_past_is_a_record_of_its_own():
    row = {"index": 0, "prompt_ids": [[1], [1, 9, 3]], "output_ids": [[2], [4]]}
    assert parse_row(row, "f") == [TokenRow("f", (1,), (2,)), TokenRow("f", (1, 9, 3), (4,))]


@pytest.mark.parametrize("reason", ["error", "skipped"])
def test_a_row_that_says_why_it_has_no_text_holds_nothing(reason):
    assert parse_row({"index": 3, reason: "too long"}, "f") == []
    assert parse_row({"index": 3, "prompt_ids": [1], reason: "too long"}, "f") == []
    for said in (None, "too long"):
        assert parse_row({"text": "a", reason: said}, "f") == [Text("f", "a")]


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"conversations": [{"role": "user", "content": "u"}]}, "u"),
        ({"messages": [{"from": "human", "value": "u"}], "text": None}, "u"),
        ({"messages": '[{"role": "user", "content": "u"}]'}, "u"),
        ({"messages": None, "conversations": [{"role": "human", "content": "u"}]}, "u"),
        ({"instruction": "u", "input": "", "output": "a"}, "ua"),
        ({"instruction": "u", "input": "more", "output": "a", "system": ""}, "u\n\nmorea"),
        ({"instruction": "u", "context": "more", "response": "a"}, "u\n\nmorea"),
        ({"system_prompt": "s", "question": "u", "response": "a"}, "sua"),
        ({"question": "u", "answer": "a"}, "ua"),
        ({"prompt": "u", "completion": "a", "response": None}, "ua"),
        ({"system": "s", "conversations": [{"from": "gpt", "value": "a"}]}, "sa"),
    ],
)
def test_forms_of_the_fields_data_sets_are_read(row, expected):
    unread = collections.Counter()
    (record,) = parse_row({**row, "tools": None}, "f", unread)
    assert "".join(message["content"] for message in record.messages) == expected
    assert not unread


def test_keys_that_are_not_read_are_counted_and_nulls_are_not():
    unread = collections.Counter()
    row = {"messages": [], "text": "rendered", "response": None, "kind": "x", "input": "y"}
    parse_row(row, "f", unread)
    parse_row(row, "f", unread)
    assert unread == {"text": 2, "kind": 2, "input": 2}
    # Also a key with which `generate` says why it could not decode a row.
    (record,) = parse_row({"messages": [], "error": "ZeroDivisionError"}, "f", unread)
    assert (record.messages, unread["error"]) == ((), 1)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a"}, "f:7: expected prompt and response, instruct"),
        ([1], r"f:7: expected an object, found \[1\]"),
        ({"text": 3}, "f:7: text must be text, not 3"),
        ({"messages": [{"role": "user"}]}, r"f:7: messages\[0\].content is missing"),
        (
            {"conversations": [{"from": "model", "value": "a"}]},
            r'f:7: conversations\[0\] is from "model"; it may be from human, user, gpt, ',
        ),
        ({"prompt_ids": [[1]], "output_ids": [[1], [2]]}, "f:7: prompt_ids and output_ids must be"),
        ({"prompt_ids": ["a"], "output_ids": [1]}, "f:7: prompt_ids and output_ids must be lists"),
    ],
)
def test_a_row_of_no_known_form_is_refused_by_name(row, message):
    with pytest.raises(UserError, match=message):
        parse_row(row, "f:7")


def test_cut_text_gives_the_docstrings_example():
    sections = cut_text(Text("f", "ab\ncd\ne"), 4)
    assert [section.text for section in sections] == ["ab\n", "cd\ne"]
    assert [section.starts for section in sections] == [True, False]
    assert [section.ends for section in sections] == [False, True]


@given(st.text(alphabet="ab\n", min_size=1, max_size=60), st.integers(1, 20))
def test_sections_join_to_the_text_and_none_is_too_long(text, max_chars):
    sections = cut_text(Text("f", text), max_chars)
    assert "".join(section.text for section in sections) == text
    assert max(len(section.text) for section in sections) <= max_chars


def test_the_split_depends_on_what_a_record_says_and_nothing_else():
    records = [Text(f"a:{i}", f"text {i}") for i in range(1000)]
    moved = [Text("elsewhere", record.text) for record in reversed(records)]
    train, heldout = split_by_hash(records)
    assert 20 < len(heldout) < 90
    assert {r.text for r in heldout} == {r.text for r in split_by_hash(moved)[1]}
    assert {r.text for r in train}.isdisjoint(r.text for r in heldout)


def test_a_handful_of_records_is_all_trained_on():
    records = [Text("f", f"text {i}") for i in range(19)]
    assert split_by_hash(records) == (records, [])


def test_a_conversation_of_texts_keeps_the_hash_of_earlier_versions():
    record = conversation("f", (("user", "a"), ("assistant", "b")))
    assert content_hash(record) == json_hash(
        {"source": None, "messages": [["user", "a"], ["assistant", "b"]]}
    )
    with_tools = conversation("f", (("user", "a"), ("assistant", "b")), variables={"tools": [1]})
    unlearned = conversation("f", (("user", "a"), ("assistant", "b")), unlearned=(1,))
    assert len({content_hash(one) for one in (record, with_tools, unlearned)}) == 3


def test_hashes_ignore_where_and_heed_what():
    a, b = Text("here", "x"), Text("there", "x")
    assert content_hash(a) == content_hash(b) != content_hash(Text("here", "y"))
    assert data_hash([a]) == data_hash([b]) != data_hash([a, b])
