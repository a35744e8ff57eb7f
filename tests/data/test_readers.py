import bz2
import gzip
import json
import lzma

import pytest

from clover_jax.data import training_data
from clover_jax.data.corpus import Document
from clover_jax.data.records import Text, TokenRow
from clover_jax.data.training_data import read_records
from clover_jax.errors import UserError
from tests.data.conversations import conversation

ROW = json.dumps({"text": "hello"}) + "\n"


def texts(spec):
    return [record.text for record in read_records(str(spec)).train]


PACKED = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


@pytest.mark.parametrize("ending", PACKED)
def test_packed_rows_are_read_and_torn_ones_refused_by_name(tmp_path, ending):
    path = tmp_path / f"a.jsonl.{ending}"
    packed = PACKED[ending]((ROW + "\n" + ROW).encode())
    path.write_bytes(packed)
    assert texts(path) == ["hello", "hello"]
    for wrong in (packed[:-9], b"plain"):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=f"{path.name}: not a whole (gzip|xz|bzip2) file"):
            texts(path)


CHAT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
LINES = (json.dumps(CHAT) + "\n") * 2
LIST = json.dumps([CHAT, CHAT], indent=1)


@pytest.mark.parametrize(
    "name, content, count",
    [
        ("lines.json", LINES, 2),
        ("lines.JSONL", LINES, 2),
        ("lines.JSONL.GZ", LINES, 2),
        ("lines.txt", LINES, 2),
        ("marked.jsonl", "\ufeff" + LINES, 2),
        ("list.json", LIST, 2),
        ("list.txt", LIST, 2),
        ("marked.json", "\ufeff" + LIST, 2),
        ("data.json", json.dumps({"version": 1, "data": [CHAT, CHAT]}), 2),
        ("one.json", json.dumps(CHAT, indent=1), 1),
    ],
)
def test_what_looks_like_rows_is_read_as_rows(tmp_path, name, content, count):
    opener = gzip.open if name.endswith("GZ") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(content.encode())
    records = read_records(str(tmp_path / name)).train
    expected = conversation("f", (("user", "hi"), ("assistant", "ho")))
    assert [record.messages for record in records] == [expected.messages] * count


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("torn.json", LIST[:-3], "torn.json: looks like rows, but is not JSON"),
        ("torn.txt", json.dumps({"data": [CHAT]})[:-4], "torn.txt: looks like rows, but is not"),
        ("torn2.json", LINES[:-9], "torn2.json:2: not JSON"),
        ("other.json", '[{"instruction": "a", "out": "b"}]', "found 'instruction', 'out'"),
        ("other2.json", '{"instruction": "a"}\n{"instruction": "b"}', "found 'instruction'"),
    ],
)
def test_what_looks_like_rows_and_is_none_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_records(str(tmp_path / name))


@pytest.mark.parametrize("content", ['{"name": "x", "files": ["a"]}', "[1, 2]", "{% if %}", "[a]"])
def test_json_without_rows_is_text_only_where_its_name_does_not_promise_rows(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    assert texts(tmp_path / "a.txt") == [content]
    # In a folder of code it is text like the rest.
    (tmp_path / "a.txt").rename(tmp_path / "a.json")
    assert texts(tmp_path) == [content]
    with pytest.raises(UserError, match="a.json: holds no rows; expected a list of objects, or o"):
        texts(tmp_path / "a.json")


def test_what_stands_next_to_a_list_of_rows_is_named(tmp_path, capsys):
    value = {"version": 1, "data": [CHAT], "splits": {"test": 3}, "note": None}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert len(read_records(str(tmp_path / "a.json")).train) == 1
    said = 'rows are read from data; 2 other keys are not: ["version", "splits"]\n'
    assert capsys.readouterr().err == f"{tmp_path}/a.json: {said}"


def test_a_folder_is_read_whole_and_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "sub" / "a.py").write_text("A")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / "rows.jsonl").write_text(ROW)
    assert texts(tmp_path) == ["B", "hello", "A"]


def test_globs_and_several_paths_are_read(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert texts(f"{tmp_path}/*.txt,{tmp_path}/c.md") == ["a.txt", "b.txt", "c.md"]


def test_rows_as_generate_writes_them_are_read(tmp_path):
    row = {"index": 0, "prompt_ids": [1], "output_ids": [2, 3], "text": None, "accepted": [0]}
    (tmp_path / "out.jsonl").write_text(json.dumps(row) + "\n")
    source = f"{tmp_path}/out.jsonl:1"
    assert read_records(f"{tmp_path}/out.jsonl").train == [TokenRow(source, (1,), (2, 3))]
    (tmp_path / "out.jsonl.manifest.json").write_text('{"prompts": 1}')
    assert read_records(str(tmp_path)).train == [TokenRow(source, (1,), (2, 3))]


def test_fields_of_records_that_are_not_read_are_named_once(tmp_path, capsys):
    row = {"prompt": "a", "response": "b", "system_prompt": "c", "id": 1, "kind": "d"}
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n" + json.dumps({"text": "d"}))
    read_records(str(tmp_path))
    assert capsys.readouterr().err == (
        f'--data={tmp_path}: fields that are not read: "kind" (2 rows)\n'
    )


def test_the_built_in_corpus_keeps_its_own_split(monkeypatch):
    monkeypatch.setattr(
        training_data, "builtin_documents", lambda split: [Document(f"{split}.py", split)]
    )
    records = read_records("builtin:python")
    assert records.train == [Text("train.py", "train")]
    assert records.heldout == [Text("heldout.py", "heldout")]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", r"a.jsonl:1: not JSON"),
        (b'{"text": "a", "text": "b"}', r"a.jsonl:1: not JSON \(the key 'text' is there twice\)"),
        (b"\xff\xff", "a.jsonl: not UTF-8|a.jsonl:1: not"),
        (b"", "holds no records"),
    ],
)
def test_unreadable_rows_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_records(str(tmp_path / "a.jsonl"))


def test_all_rows_that_cannot_be_read_are_named(tmp_path):
    lines = ['{"text": "a"}', '{"text": 3}', "{", '{"text": "b"}', "[]"]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    message = (
        "d.jsonl:2: .*text must be text, not 3; 2 more cannot be read: .*d.jsonl:3, .*d.jsonl:5$"
    )
    with pytest.raises(UserError, match=message):
        texts(str(tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    "spec, message", [("missing.txt", "no such file"), ("builtin:rust", "is unknown")]
)
def test_data_that_is_not_there_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        read_records(spec)
