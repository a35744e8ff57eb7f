"""Which files of a folder are read, and that those that are not are named with their number."""

import datetime
import importlib
import json
import os
import sys
import types

import pyarrow
import pytest
from pyarrow import parquet

from clover_jax.data import row_files
from clover_jax.data.prompts import read_prompts
from clover_jax.data.training_data import read_records
from clover_jax.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
ROW = json.dumps(CHAT) + "\n"


def write(folder, **files):
    """Write files whose names have "_" for the dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def sources(spec):
    return [os.path.basename(record.source) for record in read_records(str(spec)).train]


@pytest.mark.parametrize(
    "name",
    ["a.csv", "a.CSV", "a.tsv", "a.xlsx", "a.csv.gz", "a.tar.gz", "a.tar.bz2", "a.npz", "a.zip"],
)
def test_tables_and_archives_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"prompt,response\n")
    ending = "." + name.lower().split(".")[1]
    message = f"{name}: {ending} files are not read; give .jsonl with one object a line"
    with pytest.raises(UserError, match=message):
        read_records(str(tmp_path / name))
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_files_that_are_left_out_of_a_folder_are_named_with_their_number(tmp_path, capsys):
    write(tmp_path / "d", a_jsonl=ROW, b_csv="x", c_csv="y", d_png=b"\x89PNG\xff", README_md="card")
    write(tmp_path / "d", dataset_info_json="{}", text_txt="a text", _git="x")
    (tmp_path / "d" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "d" / "pipe.jsonl")
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    assert sources(tmp_path / "d") == ["a.jsonl:1", "text.txt"]
    said = capsys.readouterr().err
    assert said.startswith(f"--data={tmp_path}/d: files that are not read: ")
    assert set(said.strip().partition("not read: ")[2].split(", ")) == {
        *(".csv (2)", "links and the like (2)", ".json (2)", ".md (1)", ".png (1)", "hidden (1)")
    }


def test_a_card_is_text_where_there_are_no_rows(tmp_path, capsys):
    write(tmp_path / "d", README_md="a readme", a_py="pass")
    assert sources(tmp_path / "d") == ["README.md", "a.py"]
    assert capsys.readouterr().err == ""
    # A table that is not read is data too.
    write(tmp_path / "d", b_csv="x,y")
    assert sources(tmp_path / "d") == ["a.py"]


@pytest.mark.parametrize("packing", ["", "_gz"])
def test_a_folder_of_tables_alone_is_refused(tmp_path, packing):
    write(tmp_path / "d", README_md="card", **{f"b_csv{packing}": "x,y"})
    message = r"d: files that are not read: .*\.csv \(1\).*; there are no others"
    with pytest.raises(UserError, match=message):
        read_records(str(tmp_path / "d"))


def test_rows_that_generate_could_not_decode_are_counted(tmp_path, capsys):
    write(
        tmp_path / "d",
        a_jsonl=ROW + '{"index": 1, "error": "too long"}\n{"index": 2, "skipped": "s"}',
    )
    assert sources(tmp_path / "d") == ["a.jsonl:1"]
    assert (
        "left out 2 rows that `generate` could not decode, the last at" in capsys.readouterr().err
    )


@pytest.mark.parametrize("read", [read_records, read_prompts])
def test_zstd_and_tables_without_their_readers_name_the_extra(tmp_path, monkeypatch, read):
    for module in ("compression.zstd", "backports.zstd", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("a.jsonl.zst", "a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(
            UserError, match=rf"{name}: .* not installed: pip install .*\[parquet\]"
        ):
            read(str(tmp_path / name))
    # In a folder too: their rows would be missed.
    with pytest.raises(UserError, match="not installed"):
        read_records(str(tmp_path))


def test_rows_of_tables_are_those_of_lines(tmp_path, monkeypatch, capsys):
    class Batch(types.SimpleNamespace):
        def to_pylist(self):
            return self.rows

    # Merged columns: every message has all keys, most of them null.
    messages = [{**message, "tool_calls": None, "name": None} for message in CHAT["messages"]]
    table = [Batch(rows=[{**CHAT, "messages": messages, "text": None, "date": object}] * 2)] * 2
    monkeypatch.setattr(row_files, "_batches", lambda path: iter(table))
    write(tmp_path / "d", README_md="card", a_parquet=b"")
    records = read_records(str(tmp_path / "d")).train
    assert [record.messages for record in records] == [tuple(CHAT["messages"])] * 4
    assert records[3].source.endswith("a.parquet:4")
    err = capsys.readouterr().err
    assert "files that are not read: .md (1)" in err
    assert 'fields that are not read: "date" (4 rows)' in err
    assert len(read_prompts(tmp_path / "d" / "a.parquet")) == 4


def test_tables_are_read_by_pyarrow(tmp_path):
    table = pyarrow.Table.from_pylist([CHAT] * 300)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for name, new in (("b.arrow", pyarrow.ipc.new_stream), ("c.arrow", pyarrow.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        rows = list(row_files.table_rows(tmp_path / name))
        assert rows == [(f"{tmp_path / name}:{n}", CHAT) for n in range(1, 301)]
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=f"{name}: not a whole"):
            list(row_files.table_rows(tmp_path / name))


def test_bytes_of_a_table_are_not_text(tmp_path):
    table = pyarrow.Table.from_pylist([{"text": b"\x89PNG", "day": datetime.date(2024, 1, 2)}])
    parquet.write_table(table, tmp_path / "a.parquet")
    ((_, row),) = row_files.table_rows(tmp_path / "a.parquet")
    assert row == {"text": {"bytes": 4}, "day": "2024-01-02"}
    with pytest.raises(UserError, match=r'text must be text, not {"bytes": 4}'):
        read_records(str(tmp_path / "a.parquet"))


def test_zstd_is_read(tmp_path):
    in_python = sys.version_info >= (3, 14)
    zstd = importlib.import_module("compression.zstd" if in_python else "backports.zstd")
    packed = zstd.compress(ROW.encode() * 100)
    (tmp_path / "a.jsonl.zst").write_bytes(packed + zstd.compress(ROW.encode()))
    records = read_records(str(tmp_path / "a.jsonl.zst"))
    assert len(records.train) + len(records.heldout) == 101
    for torn in (packed[:-9], b"plain"):
        (tmp_path / "a.jsonl.zst").write_bytes(torn)
        with pytest.raises(UserError, match="a.jsonl.zst: not a whole zstd file"):
            read_records(str(tmp_path / "a.jsonl.zst"))


def test_a_pipe_named_as_data_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a folder"):
        read_records(str(tmp_path / "pipe"))
