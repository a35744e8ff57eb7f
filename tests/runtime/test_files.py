"""Files and folders are whole or absent, whatever happens while they are written."""

import errno
import os
import stat

import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import files


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
    with pytest.raises(RuntimeError, match="half"), files.atomic_file(tmp_path / "a") as unfinished:
        unfinished.write_text("ne")
        raise RuntimeError("half way")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def write_folder(path, **contents):
    with files.atomic_directory(path) as unfinished:
        for name, text in contents.items():
            (unfinished / "deep").mkdir(exist_ok=True)
            (unfinished / "deep" / name).write_text(text)


def test_a_folder_replaces_the_one_before(tmp_path):
    write_folder(tmp_path / "draft", old="1")
    write_folder(tmp_path / ".draft.replaced", older="0")  # of a killed run
    write_folder(tmp_path / "draft", new="2")
    assert names(tmp_path) == ["draft"]
    assert names(tmp_path / "draft" / "deep") == ["new"]


def test_a_failed_folder_leaves_the_old_one_and_nothing_else(tmp_path):
    write_folder(tmp_path / "draft", old="1")
    with (
        pytest.raises(RuntimeError, match="half"),
        files.atomic_directory(tmp_path / "draft") as unfinished,
    ):
        (unfinished / "part").write_text("p")
        raise RuntimeError("half way")
    assert names(tmp_path) == ["draft"]
    assert names(tmp_path / "draft" / "deep") == ["old"]


def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".draft.unfinished").mkdir()
    (tmp_path / ".draft.unfinished" / "rest").touch()
    write_folder(tmp_path / "draft", new="2")
    assert names(tmp_path) == ["draft"]
    assert names(tmp_path / "draft") == ["deep"]


def test_a_parent_that_is_a_file_is_an_os_error_that_names_it(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match="runs"):
        write_folder(tmp_path / "runs" / "draft", new="2")
    with pytest.raises(OSError, match="runs"):
        files.write_text(tmp_path / "runs" / "draft", "new")


def test_a_disk_that_cannot_rename_folders_is_named_at_once(tmp_path, monkeypatch):
    files.check_renames(tmp_path)
    assert names(tmp_path) == []

    def refuse(*paths):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(UserError, match="cannot rename folders .* hierarchical namespace"):
        files.check_renames(tmp_path)
    assert names(tmp_path) == []


def refuse_sync(number, of_folders):
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folders:
            raise OSError(number, os.strerror(number))
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
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
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
