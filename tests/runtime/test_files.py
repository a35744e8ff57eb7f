"""Files, folders and rows are whole or absent, whatever happens while they are written."""

import errno
import functools
import json
import os
import stat
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import files, jsonl
from clover_jax.runtime.row_writer import RowWriter


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_with_its_parents(tmp_path):
    files.write_text(tmp_path / "a" / "b.txt", "é\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == "é\n".encode()
    files.write_json(tmp_path / "a" / "b.txt", {"x": [1]})
    assert (tmp_path / "a" / "b.txt").read_text() == '{\n  "x": [\n    1\n  ]\n}\n'
    assert names(tmp_path / "a") == ["b.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    files.write_text(tmp_path / "a", "old")
    half = pytest.raises(RuntimeError, match="half")
    with half, files.atomic_file(tmp_path / "a") as unfinished:
        unfinished.write_text("ne")
        raise RuntimeError("half way")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def write_folder(path, **contents):
    with files.atomic_directory(path) as unfinished:
        for name, text in contents.items():
            (unfinished / "deep").mkdir(exist_ok=True)
            (unfinished / "deep" / name).write_text(text)


def test_a_folder_replaces_the_one_before_and_what_a_killed_run_left(tmp_path):
    write_folder(tmp_path / "draft", old="1")
    write_folder(tmp_path / ".draft.replaced", older="0")
    write_folder(tmp_path / ".draft.unfinished", rest="")
    write_folder(tmp_path / "draft", new="2")
    assert names(tmp_path) == ["draft"]
    assert names(tmp_path / "draft" / "deep") == ["new"]


def test_a_failed_folder_leaves_the_old_one_and_nothing_else(tmp_path):
    write_folder(tmp_path / "draft", old="1")
    half = pytest.raises(RuntimeError, match="half")
    with half, files.atomic_directory(tmp_path / "draft") as unfinished:
        (unfinished / "part").write_text("p")
        raise RuntimeError("half way")
    assert names(tmp_path) == ["draft"]
    assert names(tmp_path / "draft" / "deep") == ["old"]


def test_a_parent_that_is_a_file_is_an_os_error_that_names_it(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match="runs"):
        write_folder(tmp_path / "runs" / "draft", new="2")
    with pytest.raises(OSError, match="runs"):
        files.write_text(tmp_path / "runs" / "draft", "new")


def test_a_disk_that_cannot_rename_folders_is_named_at_once(tmp_path, monkeypatch):
    files.check_renames(tmp_path)
    assert names(tmp_path) == []

    monkeypatch.setattr(os, "rename", functools.partial(refusing, errno.ENOTSUP))
    with pytest.raises(UserError, match="cannot rename folders .* hierarchical namespace"):
        files.check_renames(tmp_path)
    assert names(tmp_path) == []


def refusing(number, *_):
    raise OSError(number, os.strerror(number))


def refuse_sync(number, of_folders):
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folders:
            refusing(number)
        sync(descriptor)

    return refuse


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_that_cannot_sync_folders_is_written_to(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refuse_sync(number, of_folders=True))
    write_folder(tmp_path / "draft", new="2")
    files.write_text(tmp_path / "a", "text")
    assert names(tmp_path) == ["a", "draft"]


@pytest.mark.parametrize("number, of_folders", [(errno.EINVAL, False), (errno.EIO, True)])
def test_other_failures_of_a_sync_are_raised(tmp_path, monkeypatch, number, of_folders):
    monkeypatch.setattr(os, "fsync", refuse_sync(number, of_folders))
    with pytest.raises(OSError, match=os.strerror(number)):
        write_folder(tmp_path / "draft", new="2")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_locks_locks_nobody_out(tmp_path, monkeypatch, number):
    monkeypatch.setattr(files.fcntl, "flock", functools.partial(refusing, number))
    with files.only_process_in(tmp_path, "is training", "--workdir"):
        pass


def test_a_write_that_finds_the_disk_full_names_the_file(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="a'$") as failure, files.atomic_file(tmp_path / "a"):
        raise full
    assert failure.value.filename == str(tmp_path / "a")
    with pytest.raises(OSError, match="No space left") as failure, files.naming("b"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "its own")
    assert failure.value.filename == "its own"


def test_work_that_leaves_nothing_leaves_no_folder(tmp_path):
    folder = tmp_path / "runs" / "a"
    with pytest.raises(UserError), files.only_process_in(folder, "is training", "--workdir"):
        raise UserError("a mistake in the flags")
    assert names(tmp_path) == []
    with files.only_process_in(folder, "is training", "--workdir"):
        (folder / "result.json").touch()
    assert names(folder) == ["lock", "result.json"]


def test_a_folder_that_was_there_before_stays(tmp_path):
    with files.only_process_in(tmp_path / "a", "is training", "--workdir"):
        (tmp_path / "a" / "kept").touch()
    (tmp_path / "a" / "kept").unlink()
    with files.only_process_in(tmp_path / "a", "is training", "--workdir"):
        pass
    assert names(tmp_path) == ["a"]


def test_values_of_numpy_and_jax_become_plain_json():
    value = {"a": np.int32(1), "b": jnp.arange(2), "c": (float("inf"), np.float32("nan"))}
    value |= {4: Path("x/y"), "é": True}
    assert jsonl.to_json(value) == '{"a": 1, "b": [0, 1], "c": [null, null], "4": "x/y", "é": true}'
    with pytest.raises(TypeError, match="not JSON serializable"):
        jsonl.to_json({"a": object()})


def test_rows_come_back_and_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    for step in range(3):
        jsonl.append_row(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 3')
    assert [row["step"] for row in jsonl.read_rows(path)] == [0, 1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not a JSON row"):
        list(jsonl.read_rows(path))


def test_rows_beyond_a_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)) + '{"st')
    jsonl.keep_rows(path, lambda row: row["step"] <= 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    jsonl.keep_rows(tmp_path / "absent.jsonl", lambda row: True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_names_the_file(tmp_path):
    full = tmp_path / "rows.jsonl"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failure:
        jsonl.append_row(full, {"step": 0})
    assert failure.value.filename == str(full)


SETTINGS = {"seed": 0, "stop": ("a", "b")}


def open_rows(path, *, settings=SETTINGS, prompts_hash="p", **options):
    return RowWriter(path, settings=settings, prompts_hash=prompts_hash, **options)


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


def test_rows_that_a_saved_state_does_not_know_are_cut(output):
    with open_rows(output, most=3) as rows:
        assert rows.finished == 2
    with open_rows(output, most=1) as rows:
        assert rows.finished == 1
        rows.append({"index": 1, "text": "new"})
    assert output.read_text() == '{"index": 0, "text": "é"}\n{"index": 1, "text": "new"}\n'


def test_the_same_command_resumes_after_a_torn_line(output):
    with output.open("a") as file:
        file.write('{"index": 2, "te')
    with open_rows(output) as rows:
        assert rows.finished == 2
        rows.append({"index": 2})
    assert indices(output) == [0, 1, 2]
    with open_rows(output) as rows, pytest.raises(ValueError, match="row 1 was written before"):
        rows.append({"index": 1})


def test_a_gap_at_the_end_is_an_error_but_does_not_hide_another(tmp_path):
    gap = pytest.raises(ValueError, match="row 0 of .* never came, but 1 rows")
    with gap, open_rows(tmp_path / "a") as rows:
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


def test_two_writers_at_once_and_rows_out_of_order_are_refused(output):
    with open_rows(output), pytest.raises(UserError, match="written by another process"):
        open_rows(output)
    output.write_text('{"index": 0}\n{"index": 5}\n')
    with pytest.raises(UserError, match=r"out\.jsonl:2: expected the row with index 1, found"):
        open_rows(output)
