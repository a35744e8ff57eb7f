"""Row files of jobs that share one input: joined where all is there, else what lacks is named."""

import json
import re

import pytest

from clover_jax.errors import UserError
from clover_jax.storage.row_shards import Shard, join_rows
from clover_jax.storage.row_writer import RowWriter, manifest_path

TOTAL = 7


def write(whole, shard, settings=None, prompts_hash="p"):
    """Write all rows of a shard."""
    part = shard.rows(TOTAL)
    with RowWriter(
        shard.path(whole),
        settings=settings or {"seed": 0},
        prompts_hash=prompts_hash,
        first=part.start,
        shard=shard.entry(TOTAL),
        overwrite=True,
    ) as rows:
        for index in reversed(part):
            rows.append({"index": index, "text": "\u00e9" * index})
        rows.note_seconds(1.0)


@pytest.fixture
def whole(tmp_path):
    """Where the file of three shards, which are there, is to be."""
    path = tmp_path / "out.jsonl"
    for index in range(3):
        write(path, Shard(index, 3))
    return path


def refused(whole, message, **options):
    before = whole.read_bytes() if whole.exists() else None
    with pytest.raises(UserError, match=re.escape(message)):
        join_rows(whole, **options)
    assert (whole.read_bytes() if whole.exists() else None) == before


@pytest.mark.parametrize("total", [0, 1, 7, 100])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_every_row_is_of_one_shard_and_their_numbers_are_alike(total, count):
    parts = [Shard(index, count).rows(total) for index in range(count)]
    assert [row for part in parts for row in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("count", [3, 9])
def test_the_joined_file_and_its_manifest_are_those_of_one_job(tmp_path, count):
    one, whole = tmp_path / "one.jsonl", tmp_path / "out.jsonl"
    write(one, Shard())
    for index in range(count):
        write(whole, Shard(index, count))
    join_rows(whole)
    assert whole.read_bytes() == one.read_bytes()
    manifests = [json.loads(manifest_path(path).read_text()) for path in (whole, one)]
    assert [manifest.pop("seconds") for manifest in manifests] == [count, 1.0]
    assert manifests[0] == manifests[1]


def test_a_shard_goes_on_after_a_torn_line(whole):
    part = Shard(1, 3).path(whole)
    whole_part = part.read_bytes()
    part.write_bytes(whole_part[:-3])
    entry = {"settings": {"seed": 0}, "prompts_hash": "p", "shard": Shard(1, 3).entry(TOTAL)}
    with RowWriter(part, first=2, **entry) as rows:
        assert rows.finished == 1
        rows.append({"index": 3, "text": "\u00e9" * 3})
    assert part.read_bytes() == whole_part
    with pytest.raises(UserError, match="was written with shard .*'index': 1.*, not None"):
        RowWriter(part, settings={"seed": 0}, prompts_hash="p")


def test_a_shard_that_is_missing_is_named(whole):
    refused(whole.with_name("other.jsonl"), "no shard of")
    for index in (0, 2):
        Shard(index, 3).path(whole).unlink()
    refused(whole, "shards 0/3, 2/3 are missing; run them with --shard")
    write(whole, Shard(0, 2))
    refused(whole, "shards of 2 and of 3 jobs of")


def test_rows_that_are_missing_doubled_or_of_another_shard_are_named(whole):
    part = Shard(2, 3).path(whole)
    rows = part.read_bytes()
    first, _, third = rows.splitlines(keepends=True)
    part.write_bytes(rows[:-3])
    refused(whole, "out.2-of-3.jsonl has 2 of its 3 rows; run its job again, with --shard=2/3")
    part.write_bytes(rows + third)
    refused(whole, "out.2-of-3.jsonl has more than its 3 rows")
    part.write_bytes(first + first + third)
    refused(whole, "out.2-of-3.jsonl:2: expected the row with index 5")
    part.write_bytes(b"")
    refused(whole, "out.2-of-3.jsonl has 0 of its 3 rows")


def test_shards_of_other_settings_prompts_or_numbers_of_rows_are_named(whole):
    write(whole, Shard(1, 3), settings={"seed": 1})
    refused(whole, "out.1-of-3.jsonl was written with seed 1, not 0 as")
    write(whole, Shard(1, 3), prompts_hash="q")
    refused(whole, "out.1-of-3.jsonl was written with other prompts as")
    manifest = manifest_path(Shard(1, 3).path(whole))
    manifest.write_text(manifest_path(Shard(0, 3).path(whole)).read_text())
    refused(whole, "out.1-of-3.jsonl says that it is shard {'index': 0")
    manifest.write_text("{}")
    refused(whole, "is of no shard; run its job with --overwrite")
    manifest.unlink()
    refused(whole, "cannot be read")


def test_what_is_there_is_replaced_only_if_that_is_asked_for(whole):
    whole.write_text("mine")
    refused(whole, "out.jsonl exists already; give another --output, or --overwrite")
    join_rows(whole, overwrite=True)
    assert len(whole.read_text().splitlines()) == TOTAL


def test_a_shard_that_is_being_written_is_not_joined(whole):
    shard = Shard(1, 3)
    with RowWriter(
        shard.path(whole),
        settings={"seed": 0},
        prompts_hash="p",
        first=2,
        shard=shard.entry(TOTAL),
    ):
        refused(whole, "out.1-of-3.jsonl is being written; wait for its job")
