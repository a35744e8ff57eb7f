"""Training checkpoints: everything that the next step depends on, written in the background.

Orbax writes a step's folder under a temporary name and renames it when it is complete, so a killed
run leaves the previous checkpoint untouched. Just before the renaming the hashes of its files are
written: orbax detects lost files, but restores arrays with altered bytes without an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from clover_jax.array_types import PyTree
from clover_jax.errors import UserError
from clover_jax.runtime.distributed import is_primary, wait_for_all
from clover_jax.runtime.files import hash_files, write_json

KEPT = 2  # the newest, and the one before in case the newest is damaged
HASHES = "hashes"
_UNFINISHED = ".orbax-checkpoint-tmp"

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "files may not grow that large there",
}


class Checkpoints:
    """The checkpoints of one run, written in the background; the position of the data is grain's.

    The call after a `save` raises its error.
    """

    def __init__(self, directory: Path):
        """Open `directory`, which is created if needed."""
        self.directory = directory.absolute()
        self._damaged = self.directory / "damaged"
        # Hashes lie outside the steps' folders, whose contents orbax names and checks.
        (self.directory / HASHES).mkdir(parents=True, exist_ok=True)
        # Every error is also raised; these logs would add pages of traceback to one line.
        logging.getLogger("absl").addFilter(_is_not_orbax)
        self._unraisable_hook = sys.unraisablehook
        sys.unraisablehook = self._skip_late_writes
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_hashes),
        )
        with disk_errors(self._refusal):
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, batches: grain.DatasetIterator) -> None:
        """Save a state and the position of the data after `step`; a saved step is left alone."""
        with disk_errors(self._refusal):
            # Grain's own handler would tie the checkpoint to the number of processes.
            data = ocp.args.JsonSave(batches.get_state())
            parts = ocp.args.Composite(state=ocp.args.StandardSave(state), data=data)
            self._manager.save(step, args=parts)

    def wait(self) -> None:
        """Wait until the last save is on disk; raises UserError where the disk refused it."""
        with disk_errors(self._refusal):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def restore(self, like: PyTree, batches: grain.DatasetIterator) -> tuple[Any, int] | None:
        """Return (state, step) of the newest whole checkpoint, and set `batches` to its position.

        like: arrays, or ShapeDtypeStructs with shardings, of the state to restore.
        A damaged checkpoint is set aside with a warning and the one before is restored; returns
        None if there never was one. An error with files whose hashes match, such as a lack of
        memory, is raised, and they stay. Raises UserError if every checkpoint is damaged.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                wanted = json.loads(self._hash_file(step).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):
                wanted = {}
            # Files without a hash do no harm.
            found, damage = _hash_files(self.directory / str(step)), None
            changed = sorted(name for name in wanted if found.get(name) != wanted[name])
            if changed:
                damage = f"{changed[0]} {'has changed' if changed[0] in found else 'is missing'}"
            else:
                try:
                    return self._restore_step(step, like, batches), step
                except Exception as error:  # orbax raises many types
                    # Hashes prove that the files are whole. Without them, reading is the only test.
                    if wanted:
                        raise
                    damage = f"{type(error).__name__}: {error}".splitlines()[0]
            aside = self._set_aside(step)
            line = f"checkpoint {step} is damaged ({damage}); it was moved to {aside}"
            print(line, file=sys.stderr)

        # Starting from scratch would discard checkpoints that may still be repaired.
        if self._damaged.is_dir():
            raise UserError(
                f"every checkpoint under {self.directory} is damaged; use another --workdir"
            )
        return None

    def close(self) -> None:
        """Finish the last save and stop the background threads."""
        try:
            with disk_errors(self._refusal):
                self._manager.close()
        finally:
            sys.unraisablehook = self._unraisable_hook
            logging.getLogger("absl").removeFilter(_is_not_orbax)

    def _skip_late_writes(self, unraisable: Any) -> None:
        """Pass on unraisable errors, except from writes after another write has failed.

        Orbax closes its event loop at the first failure; every other write of the same checkpoint
        then fails to report to it, with a traceback each.
        """
        if str(unraisable.exc_value) != "Event loop is closed":
            self._unraisable_hook(unraisable)

    def _restore_step(self, step: int, like: PyTree, batches: grain.DatasetIterator) -> PyTree:
        # Shapes and shardings determine the place of each leaf; no array of `like` is copied.
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        parts = {"state": ocp.args.StandardRestore(abstract), "data": ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**parts))
        batches.set_state(restored.data)
        return restored.state

    def _write_hashes(self) -> None:
        """Hash the checkpoint that is about to be renamed; called in the background."""
        if not is_primary():
            return
        # Orbax writes one checkpoint at a time, so there is at most one such folder.
        for folder in self.directory.glob(f"*{_UNFINISHED}"):
            step = int(folder.name.removesuffix(_UNFINISHED))
            write_json(self._hash_file(step), _hash_files(folder))
        # Orbax deletes checkpoints beyond KEPT; their hashes go too.
        for path in (self.directory / HASHES).glob("*.json"):
            kept = (self.directory / (path.stem + suffix) for suffix in ("", _UNFINISHED))
            if not any(folder.exists() for folder in kept):
                path.unlink(missing_ok=True)

    def _hash_file(self, step: int) -> Path:
        return self.directory / HASHES / f"{step}.json"

    def _set_aside(self, step: int) -> Path:
        aside = self._damaged / str(step)
        # All processes have read the damaged files before one of them moves them.
        wait_for_all("damage found")
        if is_primary():
            if aside.exists():
                shutil.rmtree(aside)
            aside.parent.mkdir(exist_ok=True)
            os.rename(self.directory / str(step), aside)
            self._hash_file(step).unlink(missing_ok=True)
        wait_for_all("damage set aside")
        self._manager.reload()
        return aside

    def _refusal(self, reason: str) -> str:
        """Return the message for a disk that refuses a checkpoint; it names the last whole one."""
        # By names on disk: the manager also counts a checkpoint whose writing has just failed.
        steps = [int(name) for name in os.listdir(self.directory) if name.isdecimal()]
        rest = "no checkpoint was saved yet"
        if steps:
            rest = f"checkpoint {max(steps)} is whole, the same command resumes from it"
        return (
            f"cannot save a checkpoint in {self.directory}: {reason}; free some space or give "
            f"another --workdir ({rest})"
        )


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


@contextlib.contextmanager
def disk_errors(explain: Callable[[str], str]) -> Iterator[None]:
    """Turn errors of a full or closed disk into a UserError; `explain` returns its message."""
    try:
        yield
    except Exception as error:
        # Orbax wraps errors of its threads several times, and its C++ storage raises types of its
        # own, which quote the system's words.
        cause: BaseException | None = error
        while cause is not None:
            for number, reason in _DISK_ERRORS.items():
                if os.strerror(number) in str(cause):
                    raise UserError(explain(reason)) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _hash_files(folder: Path) -> dict[str, str]:
    """Hash a checkpoint's files, except those at the top, which the renaming changes."""
    return {name: digest for name, digest in hash_files(folder).items() if "/" in name}
