"""Training checkpoints: everything that the next step depends on, written in the background.

Orbax writes a step's folder under a temporary name and renames it when it is complete, so a killed
run leaves the checkpoint before untouched. Just before the renaming the hashes of its files are
written, since orbax notices lost files but not every altered byte.
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
from typing import Any, NamedTuple

import grain
import jax
import orbax.checkpoint as ocp

from clover_jax.array_types import PyTree
from clover_jax.errors import UserError
from clover_jax.runtime.distributed import is_primary, wait_for_all
from clover_jax.storage.files import hash_files, write_json

KEPT = 2  # the newest, and the one before in case the newest turns out to be damaged
HASHES = "hashes"
# Room to ask for, in sizes of the state: itself, the draft that is exported beside it, overhead.
SPACE_FACTOR = 1.5
_UNFINISHED = ".orbax-checkpoint-tmp"

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "files may not grow that large there",
}


class Restored(NamedTuple):
    """A checkpoint read back. state: as saved; step: its number."""

    state: Any
    step: int


class Checkpoints:
    """The checkpoints of one run.

    `save` returns at once and writes in the background; an error of the last save is raised by the
    next call. The data position is the state of a grain iterator.
    """

    def __init__(self, directory: Path):
        """Open `directory`, making it where needed."""
        self.directory = directory.absolute()
        self._damaged = self.directory / "damaged"
        # Hashes lie outside the steps' folders, whose contents Orbax names and checks.
        (self.directory / HASHES).mkdir(parents=True, exist_ok=True)
        # Every error is raised as well; these logs would add pages of traceback to one line.
        logging.getLogger("absl").addFilter(_is_not_orbax)
        # `sys.unraisablehook` prints errors of Orbax's own threads, each with a traceback.
        self._unraisable_hook = sys.unraisablehook
        sys.unraisablehook = self._skip_late_writes
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_hashes),
        )
        with disk_errors(self._refusal):
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest_step(self) -> int | None:
        """Return the newest step that was saved, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, batches: grain.DatasetIterator) -> None:
        """Save a state and the position of the data after `step`; a saved step is left alone.

        Raises UserError where the disk is full or closed; the checkpoints before stay usable.
        """
        # A run that is stopped at a step which was due anyway asks twice.
        if step in self._manager.all_steps():
            return
        with disk_errors(self._refusal):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    # Not grain's own handler, which writes a file for each process: another number
                    # of processes could not resume.
                    data=ocp.args.JsonSave(batches.get_state()),
                    meta=ocp.args.JsonSave({"step": step}),
                ),
            )

    def require_space(self, state: PyTree) -> None:
        """Raise UserError where a checkpoint, and a draft beside it, will not fit on the disk.

        Found out beforehand, because the storage reports a write that failed halfway by tracebacks
        from several threads.
        """
        # Space beside the old checkpoints: one of them goes only when the new one is whole.
        needed = SPACE_FACTOR * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            reason = f"{_DISK_ERRORS[errno.ENOSPC]}: {free} bytes free, {needed:.0f} needed"
            raise UserError(self._refusal(reason))

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises UserError where the disk refused it.
        """
        with disk_errors(self._refusal):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def restore(self, like: PyTree, batches: grain.DatasetIterator) -> Restored | None:
        """Restore the newest checkpoint that is whole, and set `batches` to its position.

        like: arrays, or ShapeDtypeStructs with shardings, of the state to restore.
        A damaged one is set aside with a warning and the one before is taken; None where there
        never was one. An error with files whose hashes match, such as a lack of memory, is raised:
        they stay. Raises UserError where every one is damaged.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            hashes = self._hashes(step)
            damage = self._damage(step, hashes)
            # Hashes prove that files are whole. Without them, reading is the only test.
            if damage is None:
                try:
                    return Restored(self._restore_step(step, like, batches), step)
                except Exception as error:  # orbax raises many types
                    if hashes:
                        raise
                    damage = f"{type(error).__name__}: {error}".splitlines()[0]
            aside = self._set_aside(step)
            line = f"checkpoint {step} is damaged ({damage}); it was moved to {aside}"
            print(line, file=sys.stderr)

        # Starting anew here would throw away what may still be repaired.
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
        """Pass on unraisable errors, but for those of writes after another one has failed.

        Orbax closes its event loop with the first failure; every other write of the same checkpoint
        then fails to report to it.
        """
        if str(unraisable.exc_value) != "Event loop is closed":
            self._unraisable_hook(unraisable)

    def _restore_step(self, step: int, like: PyTree, batches: grain.DatasetIterator) -> PyTree:
        # Shapes and shardings say where each leaf goes; no array of `like` is copied.
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                data=ocp.args.JsonRestore(),
                meta=ocp.args.JsonRestore(),
            ),
        )
        # A renamed folder would give another step's data position.
        if restored.meta["step"] != step:
            raise ValueError(f"it says that it is of step {restored.meta['step']}")
        batches.set_state(restored.data)
        return restored.state

    def _write_hashes(self) -> None:
        """Hash the checkpoint that is about to get its name; called in the background."""
        if not is_primary():
            return
        # Orbax writes one checkpoint at a time, so there is one such folder.
        for folder in self.directory.glob(f"*{_UNFINISHED}"):
            step = int(folder.name.removesuffix(_UNFINISHED))
            write_json(self._hash_file(step), _hash_files(folder))
        # Hashes go with their checkpoints, which Orbax deletes beyond KEPT.
        for path in (self.directory / HASHES).glob("*.json"):
            kept = (self.directory / (path.stem + suffix) for suffix in ("", _UNFINISHED))
            if not any(folder.exists() for folder in kept):
                path.unlink(missing_ok=True)

    def _hash_file(self, step: int) -> Path:
        return self.directory / HASHES / f"{step}.json"

    def _hashes(self, step: int) -> dict[str, str]:
        """Return the hashes of a checkpoint's files; none where they were lost."""
        try:
            return json.loads(self._hash_file(step).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}  # restoring will show whether the files are whole

    def _damage(self, step: int, wanted: dict[str, str]) -> str | None:
        """Say which file of a checkpoint has not the wanted hash; None for none."""
        found = _hash_files(self.directory / str(step))
        # Files beyond the hashed ones do no harm.
        changed = sorted(name for name in wanted if found.get(name) != wanted[name])
        if not changed:
            return None
        return f"{changed[0]} {'has changed' if changed[0] in found else 'is missing'}"

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
        """Return the message for a disk that takes no checkpoint, and which one is left."""
        # By names on disk: the manager counts a checkpoint whose writing has just failed.
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
    """Turn errors of a full or closed disk into a UserError; `explain` makes its message."""
    try:
        yield
    except Exception as error:
        # The storage raises its own types, which only quote the system's words.
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise UserError(explain(reason)) from error


def _disk_reason(error: BaseException | None) -> str | None:
    """Return the reason where a chain of exceptions is of a full or closed disk; else None."""
    # Orbax wraps what its threads met several times over.
    while error is not None:
        number = getattr(error, "errno", None)
        if isinstance(error, OSError) and number in _DISK_ERRORS:
            return _DISK_ERRORS[number]
        for number, reason in _DISK_ERRORS.items():
            # The storage is C++ and puts the system's words into its message.
            if os.strerror(number) in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


def _hash_files(folder: Path) -> dict[str, str]:
    """Hash a checkpoint's files but for those at the top, which the renaming touches."""
    return {name: digest for name, digest in hash_files(folder).items() if "/" in name}
