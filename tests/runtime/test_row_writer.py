"""Output rows: in input order, resumable by the same command only."""

import json

import pytest

from clover_jax.errors import UserError
from clover_jax.runtime.row_writer import RowWriter

SETTINGS = {"seed": 0, "stop": ("a", "b")}


def open_rows(path, *, settings=SETTINGS, prompts_hash="p", overwrite=False):
    return RowWriter(path, settings=settings, prompts_hash=prompts_hash, overwrite=overwrite)


def indices(path):
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


@pytest.fixture
def output(tmp_path):
    """An output of two rows."""
    path = tmp_path / "new" / "out.jsonl"
    with open_rows(path) as rows:
        rows.append({"index": 0, "text": "é"})
        rows.append({"index": 1})
    return path


def test_rows_and_manifest_lie_beside_each_other(output):
    assert output.read_text() == '{"index": 0, "text": "é"}\n{"index": 1}\n'
    assert json.loads((output.parent / "out.jsonl.manifest.json").read_text()) == {
        "format": 1,
        "prompts_hash": "p",
        "settings": {"seed": 0, "stop": ["a", "b"]},
    }


def test_rows_that_come_early_wait_for_those_before_them(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_rows(path) as rows:
        rows.append({"index": 2})
        assert indices(path) == []
        rows.append({"index": 0})
        assert indices(path) == [0]
        rows.append({"index": 1})
        assert indices(path) == [0, 1, 2]


def test_every_row_is_on_disk_when_append_returns(tmp_path):
    with open_rows(tmp_path / "out.jsonl") as rows:
        rows.append({"index": 0})
        assert indices(tmp_path / "out.jsonl") == [0]


def test_the_same_command_resumes_after_a_torn_line(output):
    with output.open("a") as file:
        file.write('{"index": 2, "te')
    with open_rows(output) as rows:
        assert rows.finished == 2
        rows.append({"index": 2})
    assert indices(output) == [0, 1, 2]


def test_a_resumed_row_is_not_written_twice(output):
    with open_rows(output) as rows, pytest.raises(ValueError, match="row 1 was written before"):
        rows.append({"index": 1})


def test_a_gap_at_the_end_is_an_error_but_does_not_hide_another(tmp_path):
    with (
        pytest.raises(ValueError, match="row 0 of .* never came, but 1 rows"),
        open_rows(tmp_path / "a") as rows,
    ):
        rows.append({"index": 1})
    with pytest.raises(KeyError, match="cause"), open_rows(tmp_path / "b") as rows:
        rows.append({"index": 1})
        raise KeyError("cause")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": SETTINGS | {"seed": 1}}, "written with seed 0, not 1; repeat that command"),
        ({"settings": SETTINGS | {"top_k": 5}}, "top_k None, not 5"),
        ({"prompts_hash": "q"}, "written with other prompts"),
    ],
)
def test_other_settings_are_refused_and_named_and_change_nothing(output, changes, said):
    before = output.read_bytes()
    with pytest.raises(UserError, match=said):
        open_rows(output, **changes)
    assert output.read_bytes() == before
    with open_rows(output, overwrite=True, **changes) as rows:
        assert rows.finished == 0
    assert output.read_bytes() == b""


def test_seconds_of_earlier_runs_are_kept_beside_the_rows(output):
    with open_rows(output) as rows:
        rows.note_seconds(2.5)
        assert rows.earlier_seconds == 0
    with pytest.raises(ZeroDivisionError), open_rows(output) as rows:
        rows.note_seconds(1.0)
        raise ZeroDivisionError
    with open_rows(output) as rows:
        assert (rows.finished, rows.earlier_seconds) == (2, 3.5)
    with open_rows(output, overwrite=True) as rows:
        assert rows.earlier_seconds == 0


def test_what_is_overwritten_stays_until_there_is_a_row(output):
    manifest = output.parent / "out.jsonl.manifest.json"
    before = output.read_bytes(), manifest.read_bytes()
    anew = {"settings": SETTINGS | {"seed": 1}, "overwrite": True}
    with pytest.raises(ZeroDivisionError), open_rows(output, **anew) as rows:
        assert (rows.finished, list(rows.kept())) == (0, [])
        rows.append({"index": 1})  # waits for row 0, which fails
        raise ZeroDivisionError
    assert (output.read_bytes(), manifest.read_bytes()) == before
    with open_rows(output) as rows:
        assert [row["index"] for row in rows.kept()] == [0, 1]
    with open_rows(output, **anew) as rows:
        rows.append({"index": 0})
        assert indices(output) == [0]
        assert json.loads(manifest.read_text())["settings"]["seed"] == 1


def test_a_file_that_nobody_here_wrote_is_refused(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work\n")
    with pytest.raises(UserError, match="has no manifest to resume from; give another --output"):
        open_rows(path)
    assert path.read_text() == "years of work\n"


@pytest.mark.parametrize("manifest", [b"[]", b'{"format": 1}', b"\xff", b"{"])
def test_a_spoilt_manifest_is_named(output, manifest):
    (output.parent / "out.jsonl.manifest.json").write_bytes(manifest)
    with pytest.raises(UserError, match="--overwrite"):
        open_rows(output)


def test_rows_out_of_order_are_refused(output):
    output.write_text('{"index": 0}\n{"index": 5}\n')
    with pytest.raises(UserError, match=r"out\.jsonl:2: expected the row with index 1, found"):
        open_rows(output)


def test_two_writers_at_once_are_refused(output):
    with open_rows(output), pytest.raises(UserError, match="written by another process"):
        open_rows(output)
