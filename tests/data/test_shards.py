import sys

import ml_dtypes
import numpy as np
import pytest

from clover_jax.data.prepared import ShardReader, ShardWriter, in_shards, pack, unpack
from clover_jax.errors import UserError

MADE_FROM = {"data_hash": "abc", "seq_len": 8}


def records(count, size=3000):
    return [pack({"a": np.full(size, index, np.int32)}) for index in range(count)]


def write(directory, count=6, made_from=MADE_FROM):
    """Write two records a shard."""
    writer = ShardWriter(directory, "x.json", made_from)
    for start in range(writer.num_records, count, 2):
        writer.write(records(count)[start : start + 2])
    return writer


def values(reader):
    return [int(reader[index]["a"][0]) for index in range(len(reader))]


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, ml_dtypes.bfloat16])
def test_arrays_come_back_as_they_were(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = unpack(pack({"a": array, "empty": array[:0]}))
    assert found["a"].dtype == dtype
    np.testing.assert_array_equal(found["a"], array)
    assert found["empty"].shape == (0, 3)


def test_records_are_grouped_as_the_docstring_says():
    groups = in_shards(iter([b"aaa", b"bbb", b"ccc"]), 5)
    assert [len(group) for group in groups] == [2, 1]


def test_records_are_read_in_order_across_shards(tmp_path):
    write(tmp_path).finish()
    assert values(ShardReader(tmp_path / "x.json")) == [0, 1, 2, 3, 4, 5]


def test_nothing_is_read_from_no_shards(tmp_path):
    ShardWriter(tmp_path, "x.json", MADE_FROM).finish()
    assert len(ShardReader(tmp_path / "x.json")) == 0


def test_an_unfinished_folder_is_refused_and_taken_up(tmp_path):
    write(tmp_path, count=4)
    (tmp_path / ".x-00002.array_record.123.unfinished").write_bytes(b"left by a killed run")
    with pytest.raises(UserError, match="is not complete; repeat the `prepare`"):
        ShardReader(tmp_path / "x.json")
    writer = ShardWriter(tmp_path, "x.json", MADE_FROM)
    assert writer.num_records == 4
    writer.write(records(6)[4:])
    assert writer.finish()["records"] == 6
    assert values(ShardReader(tmp_path / "x.json")) == [0, 1, 2, 3, 4, 5]
    assert not list(tmp_path.glob(".*"))


def test_other_contents_are_refused_naming_the_difference(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"another seq_len \(8, not 16\); .*--overwrite"):
        ShardWriter(tmp_path, "x.json", MADE_FROM | {"seq_len": 16})


def test_a_changed_byte_is_found_when_it_is_read(tmp_path):
    write(tmp_path).finish()
    shard = tmp_path / "x-00001.array_record"
    content = bytearray(shard.read_bytes())
    content[content.index(np.full(100, 3, np.int32).tobytes()) + 50] ^= 1
    shard.write_bytes(content)
    reader = ShardReader(tmp_path / "x.json")
    assert reader[2]["a"][0] == 2
    with pytest.raises(UserError, match=r"x-00001.array_record: record 3 is damaged .*delete"):
        reader[3]


@pytest.mark.parametrize("spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(b"short")])
def test_a_lost_or_torn_shard_is_refused_and_written_anew(tmp_path, spoil):
    write(tmp_path).finish()
    spoil(tmp_path / "x-00001.array_record")
    with pytest.raises(UserError, match=r"x-00001.array_record (is missing|has 5 bytes)"):
        ShardReader(tmp_path / "x.json")
    write(tmp_path).finish()
    assert values(ShardReader(tmp_path / "x.json")) == [0, 1, 2, 3, 4, 5]


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"format_version": 9}')
    with pytest.raises(UserError, match="format_version 9; this program reads 1"):
        ShardReader(path)


def test_a_platform_without_the_library_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UserError, match="need the package array_record.*train on the raw files"):
        write(tmp_path)
