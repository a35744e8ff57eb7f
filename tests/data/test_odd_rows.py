"""Odd values of any key of a row or a message: read, or refused in one line that names the row."""

import collections
import copy

import pytest

from clover_jax.data.chat import encode_prompt, encode_record
from clover_jax.data.chat_templates import template_notice
from clover_jax.data.forms import parse_row
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.records import content_hash
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.data.family_templates import HERMES
from tests.tiny_tokenizers import save_byte_level

ODD = (
    *(None, 0, 1, -1, 1.5, True, float("nan"), 10**400, "", "x", "[]", "{}", "null", "a\ud83d"),
    *([], [None], ["x"], [[]], [1], {}, {"a": None}, [{}], [{"role": "user"}], {"function": {}}),
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b", "tool_calls": [CALL], "weight": 1},
    {"role": "tool", "content": "c", "tool_call_id": "c", "name": "f"},
    {"from": "gpt", "value": "d"},
]
ROWS = (
    {"messages": MESSAGES, "tools": [CALL], "documents": [{"title": "t"}], "system": "s",
     "chat_template_kwargs": {"k": 1}, "enable_thinking": True, "error": "e"},
    {"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]},
    {"instruction": "a", "input": "b", "output": "c", "system_prompt": "s"},
    {"question": "a", "answer": "b", "response": None},
    {"text": "a", "error": None},
    {"prompt_ids": [[1], [1, 2, 3]], "output_ids": [[2], [4]], "index": 0},
)  # fmt: skip


def places(value, path=()):
    """Yield the path of everything within a value."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from places(item, (*path, key))


def changed(row, path, odd):
    if not path:
        return odd
    row = copy.deepcopy(row)
    within = row
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = odd
    return row


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_odd_values_anywhere_in_a_row_are_read_or_refused_in_one_line(tmp_path, number):
    tokenizer = load_tokenizer(save_byte_level(tmp_path, HERMES))

    def as_data(row):
        records = parse_row(row, "f:1", collections.Counter())
        template_notice(records, tokenizer)
        for record in records:
            content_hash(record)
            encode_record(record, tokenizer, 300)

    def as_prompt(row):
        encode_prompt(parse_prompt(row, 0, "f:1"), tokenizer, 300)

    for path in places(ROWS[number]):
        for odd in ODD:
            for read in (as_data, as_prompt):
                try:
                    read(changed(ROWS[number], path, odd))
                except UserError as error:
                    (line,) = str(error).splitlines()
                    assert line.startswith("f:1: "), (path, odd)
