"""Atomic files and folders: written under another name, synced, then renamed."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from clover_jax.errors import UserError

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Give a system error that names no file this path: a write that fails names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, else it is removed.

    A reader sees the old file or the new one, never a part. Missing parents are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path, f"{os.getpid()}.")  # several processes may write the same cache
    try:
        with naming(path):
            yield unfinished
            # Bytes first, then the name: after a crash the file is the old one, or new and whole.
            _sync(unfinished)
            os.replace(unfinished, path)
            _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; on success it takes the place of `path`.

    The old content of `path` is deleted afterwards. One process at a time may write one `path`: the
    temporary name is fixed, so that the next run clears the rest of a killed one.
    """
    path = Path(path)
    # A killed run may have left its temporary folder, which would be in the way.
    recover_directory(path)
    unfinished = _unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        with naming(path):
            yield unfinished
            # Renamed only when all is on disk: a crash must not leave half a folder by that name.
            for folder, _, names in os.walk(unfinished):
                for name in names:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            put_in_place(unfinished, path)
    finally:
        _remove(unfinished)


def recover_directory(path: str | os.PathLike) -> None:
    """Clean up after a process that was killed while it wrote the folder `path`.

    A folder that it had moved away is restored, and its temporary folders are deleted.
    """
    path = Path(path)
    if not os.path.lexists(path) and os.path.lexists(_replaced(path)):
        os.rename(_replaced(path), path)  # killed between two renames
    _remove(_replaced(path))
    _remove(_unfinished(path))


@contextlib.contextmanager
def scratch_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty folder beside `path`, on the same disk; it is deleted afterwards."""
    folder = _unfinished(Path(path), "scratch.")
    _remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        _remove(folder)


def put_in_place(new: Path, path: Path) -> None:
    """Move a whole file or folder to `path`, in one step where the system can; delete the old."""
    replaced = _replaced(path)
    if not os.path.lexists(path):
        os.rename(new, path)
    elif not _exchange(new, path):
        # No atomic exchange on this system: for an instant nothing is at `path`.
        _remove(replaced)
        os.rename(path, replaced)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(replaced, path)
            raise

    # What was there before lies under one of two names now: the second after an exchange.
    _remove(replaced)
    _sync(path.parent)
    _remove(new)


def place_for(path: str | os.PathLike, flag: str) -> Path:
    """Return the path of a file that will be written after long work.

    Raises UserError, naming the flag, where no file can be written.
    """
    # Found out before the work: afterwards the result would be lost.
    place = Path(path).expanduser()
    if place.is_dir() or not place.parent.is_dir():
        raise UserError(f"{flag}={path} must be a file in a folder that exists")
    return place


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a whole UTF-8 file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def hash_files(folder: Path) -> dict[str, str]:
    """Return relative name -> SHA-256 of every file below a folder, by name."""
    hashes = {}
    # Sorted, so that the first one that is wrong does not depend on the file system.
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            hashes[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return hashes


@contextlib.contextmanager
def only_process_in(folder: Path, what_it_does: str, flag: str) -> Iterator[None]:
    """Lock `folder` against a second process of the same work; make it where it is missing.

    A folder that was made here and is still empty at the end is removed.
    Raises UserError, "another run `what_it_does` in FOLDER; ... give another `flag`".
    """
    # From the innermost folder out: they are removed in this order.
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "lock"
    with place.open("w") as file:
        if not lock(file):
            raise UserError(
                f"another run {what_it_does} in {folder}; wait for it or give another {flag}"
            )
        try:
            yield
        finally:
            # A mistake found right away should leave no empty folders behind.
            if made and os.listdir(folder) == [place.name]:
                place.unlink()
                # Another process may have written there meanwhile: such a folder is not empty.
                with contextlib.suppress(OSError):
                    for path in made:
                        path.rmdir()


def lock(file: IO) -> bool:
    """Lock an open file until it is closed; return False where another process holds the lock.

    A file system without locks always grants them, so two writers are not detected there.
    """
    try:
        # The system releases the lock when the process ends, however it ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def check_replaceable(
    path: Path, overwrite: bool, what: str, is_one: Callable[[Path], bool]
) -> None:
    """Raise UserError where an output folder is there already and must not be deleted.

    what, is_one: what this command writes, and whether a folder is one; with `overwrite`, such a
        folder or an empty one may go.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise UserError(f"{path} is there already; give another --output, or --overwrite")
    # A mistyped path may be any folder of the user's.
    if not path.is_dir() or (any(path.iterdir()) and not is_one(path)):
        raise UserError(
            f"{path} is no {what}, so it is none of this command's folders and stays; give another "
            "--output"
        )


def check_renames(folder: Path) -> None:
    """Raise UserError where `folder` cannot rename a folder with others in it.

    Checkpoints and drafts get their names that way. A bucket mounted by Cloud Storage FUSE can do
    so only with a hierarchical namespace.
    """
    # Tried out, because nothing else tells what a mounted file system can do.
    with scratch_directory(folder / "renames") as scratch:
        (scratch / "a" / "deep").mkdir(parents=True)
        (scratch / "a" / "deep" / "file").touch()
        try:
            os.rename(scratch / "a", scratch / "b")
        except OSError as error:
            raise UserError(
                f"{folder} lies on a file system that cannot rename folders ({error.strerror}), as "
                "checkpoints need it; use another disk, or a bucket with a hierarchical namespace"
            ) from error


def _unfinished(path: Path, infix: str = "") -> Path:
    return path.with_name(f".{path.name}.{infix}unfinished")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step where the system can (Linux, most file systems)."""
    # Python has no call for this exchange.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (FUSE, network drives) sync files but know no sync of a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
