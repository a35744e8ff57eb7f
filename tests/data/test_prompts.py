"""Prompt rows: every form, every mistake with its place and what would be right."""

import gzip
import io
import json
from pathlib import Path

import pytest

from clover_jax.data.prompts import (
    BadPrompt,
    Failures,
    Prompt,
    parse_prompt,
    prompts_hash,
    read_prompt_files,
    read_prompts,
    read_prompts_and_mistakes,
    text_prompt,
)
from clover_jax.errors import UserError

# Without the time of day, which would give the tests other names in every process.
GZIPPED = gzip.compress(b"{}" * 100, mtime=0)


def parse(**row):
    return parse_prompt(row, index=0, source="p.jsonl:1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Once"}, {"text": "Once"}),
        ({"question": "Why?", "answer": "42"}, {"turns": ("Why?",)}),
        ({"prompt_ids": [1, 2]}, {"prompt_ids": (1, 2)}),
        ({"turns": ["a", "b"], "question_id": 81}, {"turns": ("a", "b")}),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            {"messages": ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})},
        ),
        ({"prompt": "a", "turns": None}, {"text": "a"}),
    ],
)
def test_every_form_of_row_is_read(row, expected):
    assert parse(**row) == Prompt(index=0, source="p.jsonl:1", **expected)


def test_every_option_is_read():
    prompt = parse(
        prompt="a",
        seed=3,
        temperature=1,
        top_k=0,
        top_p=0.9,
        max_new_tokens=5,
        stop="\n",
        category="math",
    )
    assert (prompt.seed, prompt.temperature, prompt.top_k, prompt.top_p) == (3, 1.0, 0, 0.9)
    assert (prompt.max_new_tokens, prompt.stop, prompt.category) == (5, ("\n",), "math")
    assert parse(prompt="a", stop=["x", "y"]).stop == ("x", "y")
    assert parse(prompt="a", stop=[]).stop == ()  # not the command's


def test_a_row_knows_its_turns_and_whether_it_is_a_conversation():
    assert (parse(prompt="a").num_turns, parse(prompt="a").is_conversation) == (1, False)
    assert (parse(prompt_ids=[1]).num_turns, parse(prompt_ids=[1]).is_conversation) == (1, False)
    assert (parse(turns=["a", "b"]).num_turns, parse(turns=["a", "b"]).is_conversation) == (2, True)
    assert parse(question="a").is_conversation


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {},
            "expected one of prompt, question, prompt_ids, messages, conversations, instruction, "
            "turns; found only nothing",
        ),
        ({"text": "a", "id": 1}, "found only 'text', 'id'"),
        ({"prompt": "a", "turns": ["b"]}, "found prompt and turns"),
        ({"prompt": 3}, "prompt must be a string, not 3"),
        ({"prompt_ids": []}, "prompt_ids must be a list of token ids, at least one, not []"),
        ({"prompt_ids": [1, -1]}, "not [1, -1]"),
        ({"prompt_ids": [True]}, "not [true]"),
        ({"turns": "a"}, 'turns must be a list of strings, at least one, not "a"'),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role must be a name"),
        ({"messages": [{"role": "user", "content": [3]}]}, "content[0] has the type 3; only text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must be messages that end with"),
        ({"prompt": "a", "seed": 1.5}, "seed must be a whole number from 0, not 1.5"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature must be a number, not "hot"'),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be a number"),
        ({"prompt": "a", "temperature": 10**309}, "temperature must be a number"),
        ({"prompt": "a", "top_k": True}, "top_k must be a whole number, not true"),
        ({"prompt": "a", "top_p": "0"}, 'top_p must be a number, not "0"'),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        ({"prompt": "a", "stop": ""}, "stop must be a string or a list of strings"),
        ({"prompt": "a", "stop": ["x", ""]}, "none of them empty"),
        ({"prompt": "a", "stop": {"x": 1}}, "none of them empty"),
    ],
)
def test_a_mistake_names_the_place_the_value_and_what_is_right(row, said):
    with pytest.raises(UserError) as raised:
        parse(**row)
    assert str(raised.value).startswith("p.jsonl:1: ")
    assert said in str(raised.value)


def test_a_long_value_is_shown_in_part():
    with pytest.raises(UserError) as raised:
        parse(prompt_ids=["x" * 1000])
    assert len(str(raised.value)) < 150


@pytest.mark.parametrize("compress", [False, True])
def test_files_are_read_with_empty_lines_and_separators_inside_strings(tmp_path, compress):
    path = tmp_path / ("p.jsonl.gz" if compress else "p.jsonl")
    content = '{"prompt": "a\u2028b"}\r\n\n{"question": "é"}'.encode()
    path.write_bytes(gzip.compress(content) if compress else content)
    first, second = read_prompts(path)
    assert (first.index, first.source, first.text) == (0, f"{path}:1", "a\u2028b")
    assert (second.index, second.source, second.turns) == (1, f"{path}:3", ("é",))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "p.jsonl:2: not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n["a"]\n', 'p.jsonl:2: expected an object, found ["a"]'),
        ("p.jsonl", b'{"prompt": "\xff"}', "p.jsonl:1: not UTF-8"),
        ("p.jsonl", b"\n", "p.jsonl: no rows; expected one a line"),
        ("p.json", b'[{"prompt": "a"}]', "p.json: a JSON list; prompts need a .jsonl file, one "),
        ("p.jsonl.gz", b"plain", "p.jsonl.gz: not a whole gzip file"),
        ("p.jsonl.gz", GZIPPED[:-9], "p.jsonl.gz: not a whole gzip file"),
        ("p.jsonl.gz", GZIPPED[:12] + b"\xff" * 40, "not a whole gzip file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_prompts(tmp_path / name)
    assert said in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert [row.text for row in read_prompts(path)] == ["a"]


def test_fields_that_no_command_reads_are_named_once(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    row = {"prompt": "a", "max_tokens": 5, "id": 1}
    path.write_text((json.dumps(row) + "\n") * 2 + '{"prompt": "b", "Seed": 1}\nnot json\n')
    read_prompts_and_mistakes(path)
    assert capsys.readouterr().err == (
        f'{path}: fields that are not read: "max_tokens" (2 rows), "Seed" (1 row)\n'
    )
    path.write_text('{"prompt": "a", "seed": 1, "question_id": 3}')
    read_prompts(path)
    assert capsys.readouterr().err == ""


def test_a_dash_reads_standard_input(monkeypatch):
    lines = io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": 3}\n'))
    monkeypatch.setattr("sys.stdin", lines)
    good, bad = read_prompts_and_mistakes(Path("-"))
    assert (good.source, good.text) == ("standard input:1", "a")
    assert bad.error.startswith("standard input:2: prompt must be a string")
    assert not lines.closed


def test_the_hash_sees_what_is_asked_and_not_where_it_was_written(tmp_path):
    def hash_of(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prompts_hash(read_prompts(tmp_path / name))

    same = hash_of("a.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert hash_of("b.jsonl", {"prompt": "a", "note": 1}, {"prompt": "b"}) == same
    assert hash_of("c.jsonl", {"prompt": "b"}, {"prompt": "a"}) != same
    assert hash_of("d.jsonl", {"prompt": "a", "seed": 1}, {"prompt": "b"}) != same


def test_the_hash_of_a_mistake_leaves_out_where_it_was_written(tmp_path):
    def hash_of(name, row):
        (tmp_path / name).write_text('{"prompt": "a"}\n' + row)
        return prompts_hash(read_prompts_and_mistakes(tmp_path / name))

    assert hash_of("a.jsonl", "not json") == hash_of("b.jsonl", "not json")
    assert hash_of("a.jsonl", "not json") != hash_of("b.jsonl", "[]")


def test_text_from_the_command_line_is_a_row():
    prompt = text_prompt("Once")
    assert (prompt.index, prompt.source, prompt.text) == (0, "--prompt", "Once")


def test_mistakes_can_stand_in_the_place_of_their_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    deep, long = b'{"prompt": ' + b"[" * 100_000, b'{"seed": ' + b"1" * 5000 + b"}"
    rows = [b'{"prompt": "a"}', b'{"prompt": 3}', b"\xff", deep, long, b'{"prompt": "b"}']
    path.write_bytes(b"\n".join(rows))
    first, number, *others, last = read_prompts_and_mistakes(path)
    assert (first.text, last.text, last.index) == ("a", "b", 5)
    assert number == BadPrompt(1, f"{path}:2", f"{path}:2: prompt must be a string, not 3")
    said = ["not UTF-8 text", "nested too deeply", "not JSON (Exceeds the limit"]
    for line, (row, expected) in enumerate(zip(others, said, strict=True), start=3):
        assert row.error.startswith(f"{path}:{line}: ")
        assert expected in row.error
    with pytest.raises(UserError, match="p.jsonl:2: prompt must be a string"):
        read_prompts(path)


def test_a_final_answer_is_dropped_and_rows_of_files_are_numbered_through(tmp_path, capsys):
    asked = {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": "a"}
    rows = [[asked, answer, asked], [asked, answer, asked, answer], [answer]]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    files = f"{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}"
    first, second, bad, last = read_prompt_files(files)
    assert first.messages == second.messages == (asked, answer, asked)
    assert [row.index for row in (first, second, bad, last)] == [0, 1, 2, 3]
    assert isinstance(bad, BadPrompt)
    said = capsys.readouterr().err
    assert said == (
        f"{tmp_path / 'a.jsonl'}: 1 of 3 rows end with an assistant message, which is dropped and "
        "decoded again\n"
    )
    with pytest.raises(UserError, match="a.jsonl:3: messages must be"):
        read_prompt_files(files, strict=True)
    with pytest.raises(UserError, match="--prompts=, names no file"):
        read_prompt_files(",")


def test_a_reason_is_told_once_with_a_count():
    failures = Failures()
    assert failures.add({"index": 0, "output_ids": []}) is None
    first = failures.add({"index": 1, "error": "p.jsonl:2: turns must be a list, not 3"})
    assert first == "row 1 failed: p.jsonl:2: turns must be a list, not 3"
    assert failures.add({"index": 2, "error": 'p.jsonl:3: turns must be a list, not "x"'}) is None
    assert failures.add({"index": 2, "error": 'p.jsonl:3: turns must be a list, not "x"'}) is None
    assert failures.add({"index": 3, "skipped": "too long"}) == "row 3 skipped: too long"
    assert failures.counts() == ["2 rows failed for the same reason as row 1"]
