"""Atomic files and folders: written under a temporary name, synced, then renamed; JSON read."""

import contextlib
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


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Add this path to a system error without a file name, as a failing write raises it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success: a reader never sees a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same cache file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
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
    """Yield an empty temporary folder next to `path`; on success it replaces `path`.

    One process at a time may write to `path`; the next run removes what a killed one left.
    """
    path = Path(path)
    with scratch_directory(path) as unfinished, naming(path):
        yield unfinished
        # Everything is on disk before the rename: a crash must not leave half a folder there.
        for folder, _, names in os.walk(unfinished):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
        put_in_place(unfinished, path)


@contextlib.contextmanager
def scratch_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty folder next to `path`, on the same disk; it is deleted afterwards."""
    folder = Path(path).with_name(f".{Path(path).name}.unfinished")
    _remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        _remove(folder)


def put_in_place(new: Path, path: Path) -> None:
    """Move a complete file or folder to `path`, then delete what was there before."""
    replaced = path.with_name(f".{path.name}.replaced")
    _remove(replaced)
    # A folder cannot be renamed over another one; moved away, the old one is not lost.
    if os.path.lexists(path):
        os.rename(path, replaced)
    os.rename(new, path)
    _sync(path.parent)
    _remove(replaced)


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
    """Lock `folder`, created if missing; raises UserError where another process works in it."""
    # Innermost first, the order in which they are removed if nothing is written.
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
            # A mistake that is found at once should leave no empty folders behind.
            if made and os.listdir(folder) == [place.name]:
                place.unlink()
                # Another process may have written into one of them meanwhile.
                with contextlib.suppress(OSError):
                    for path in made:
                        path.rmdir()


def lock(file: IO) -> bool:
    """Lock an open file until it is closed; return False where another process holds the lock.

    On a file system without locks this always returns True: a second writer is not detected.
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


def check_replaceable(path: Path, overwrite: bool, what: str, is_one: Callable) -> None:
    """Raise UserError if a folder exists and is not to be replaced: not asked, or not a `what`."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise UserError(f"{path} exists already; give another --output, or --overwrite")
    # A mistyped path may be any folder of the user.
    if not path.is_dir() or (any(path.iterdir()) and not is_one(path)):
        raise UserError(
            f"{path} is not a {what}, so --overwrite does not delete it; give another --output"
        )


def check_renames(folder: Path) -> None:
    """Raise UserError if the file system of `folder` cannot rename a folder that is not empty.

    A bucket mounted with Cloud Storage FUSE needs a hierarchical namespace for it.
    """
    # Only a trial shows what a mounted file system supports.
    with scratch_directory(folder / "renames") as scratch:
        (scratch / "a" / "deep").mkdir(parents=True)
        (scratch / "a" / "deep" / "file").touch()
        try:
            os.rename(scratch / "a", scratch / "b")
        except OSError as error:
            raise UserError(
                f"{folder} is on a file system that cannot rename folders ({error.strerror}), as "
                "checkpoints need; use another disk, or a bucket with a hierarchical namespace"
            ) from error


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
        # Some file systems (FUSE, network drives) cannot sync a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError for a key that is there twice.

    Readers would take different ones of the two.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises UserError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
