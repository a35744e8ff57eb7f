"""A file of output rows that a stopped run can resume.

`OUTPUT` has one row a line, in input order, each flushed when written; a torn last line is dropped.
`OUTPUT.manifest.json` has the settings and prompts of the rows: only the same command resumes.
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import lock, naming, read_json_object, write_json
from clover_jax.runtime.jsonl import read_rows, to_json

_FORMAT = 1
_MANIFEST = ".manifest.json"
_SECONDS_BETWEEN_NOTES = 1.0


class RowSink(AbstractContextManager["RowSink"]):
    """Pass on rows in input order, after `finished` ones of earlier runs; this base drops them."""

    def __init__(self, finished: int = 0):
        self.finished, self.earlier_seconds = finished, 0.0
        # Index -> row that waits for the rows before it.
        self._waiting: dict[int, dict[str, Any]] = {}

    def kept(self) -> Iterable[dict[str, Any]]:
        """Return the rows of earlier runs that this one resumes."""
        return ()

    def append(self, row: dict[str, Any]) -> None:
        """Write `row`, whose "index" is its place in the input, once all before it are written."""
        index = row["index"]
        if index < self.finished or index in self._waiting:
            raise ValueError(f"row {index} was written before")
        self._waiting[index] = row
        while self.finished in self._waiting:
            self._write(self._waiting.pop(self.finished))
            self.finished += 1

    def note_seconds(self, seconds: float) -> None:
        """Record the duration of this run, which a resumed run adds to its own."""

    def _write(self, row: dict[str, Any]) -> None:
        """Write the next row."""

    def __exit__(self, exception_type: type | None, *rest: object) -> None:
        return None


class RowWriter(RowSink):
    """Append rows in input order to a file that the same command can resume."""

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        settings: dict[str, Any],
        prompts_hash: str,
        overwrite: bool = False,
        most: int | None = None,
    ):
        """Open `path` for appending, after the rows of an earlier run.

        settings: everything that the rows depend on, as JSON values.
        overwrite: start again; the old rows stay until the first new row replaces them.
        most: keep this many rows at most: those that a state, saved after each row, knows of.
        Raises UserError if `path` has other settings or prompts, no manifest, or another writer.
        """
        super().__init__()
        self.path = Path(path)
        self._manifest_path = manifest_path(self.path)
        self._replaces, self._noted = overwrite, 0.0
        manifest = {"format": _FORMAT, "prompts_hash": prompts_hash, "settings": settings}
        self._manifest = json.loads(to_json(manifest))  # tuples become lists, as when read back
        # Rows in a device or a pipe cannot be read back.
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise UserError(f"{self.path} is not a regular file; rows can be kept only in one")

        # Opened for appending, so that nothing is truncated before the lock is held.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            if not lock(self._file):
                raise UserError(
                    f"{self.path} is being written by another process; wait for it or give another "
                    "--output"
                )
            if not overwrite:
                # The manifest first: only rows of the same command are read.
                self._resume_manifest()
                write_json(self._manifest_path, self._manifest)
                self.finished = self._cut(most)
        except BaseException:
            self._file.close()
            raise

    def kept(self) -> Iterable[dict[str, Any]]:
        # With `overwrite` the old rows stay until the first new row, and are not kept.
        return () if self._replaces else read_rows(self.path)

    def _write(self, row: dict[str, Any]) -> None:
        self._replace()
        with naming(self.path):
            self._file.write(to_json(row).encode() + b"\n")
            self._file.flush()

    def note_seconds(self, seconds: float) -> None:
        """Record the duration of this run, on disk once a second at most and at the end."""
        self._manifest["seconds"] = self.earlier_seconds + seconds
        if not self._replaces and time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:
            self._noted = time.monotonic()
            write_json(self._manifest_path, self._manifest)

    def __exit__(self, exception_type: type | None, *rest: object) -> None:
        if exception_type is None:
            self._replace()  # empties the file if there were no rows
        if "seconds" in self._manifest and not self._replaces:
            write_json(self._manifest_path, self._manifest)
        self._file.close()
        # Without another failure, a gap in the rows is a bug.
        if exception_type is None and self._waiting:
            raise ValueError(
                f"row {self.finished} of {self.path} never came, "
                f"but {len(self._waiting)} rows after it did"
            )

    def _replace(self) -> None:
        """Empty a file that is overwritten; called when the first row is written."""
        if self._replaces:
            self._file.truncate(0)
            write_json(self._manifest_path, self._manifest)
            self._replaces = False

    def _resume_manifest(self) -> None:
        """Refuse rows of another command, and read how many seconds earlier runs took."""
        # A file opened for appending is positioned at its end: 0 means that it is empty.
        if self._file.tell() == 0:
            return
        # Rows of unknown origin are neither extended nor deleted unless asked.
        if not self._manifest_path.is_file():
            raise UserError(
                f"{self.path} exists and has no manifest to resume from; "
                "give another --output, or --overwrite to start again"
            )
        try:
            before = read_json_object(self._manifest_path)
        except UserError as error:
            raise UserError(f"{error}; --overwrite starts over") from error

        difference = first_difference(before, self._manifest)
        if difference:
            raise UserError(
                f"{self.path} was written with {difference}; "
                "repeat that command to resume it, give another --output, or --overwrite"
            )
        # A run that was killed early has not recorded any.
        seconds = before.get("seconds")
        if isinstance(seconds, int | float):
            self._manifest["seconds"] = self.earlier_seconds = seconds

    def _cut(self, most: int | None) -> int:
        """Cut a torn last line, and rows beyond `most`; return how many rows remain."""
        self._file.seek(0)
        num_rows = end = 0
        # A kill can tear the last line only; any other damage is reported.
        for line in self._file:
            if not line.endswith(b"\n") or num_rows == most:
                break
            try:
                index = json.loads(line)["index"]
            except (ValueError, KeyError, TypeError):
                index = None
            # Rows are in input order without a gap, so each index is known.
            if index != num_rows:
                raise UserError(
                    f"{self.path}:{num_rows + 1}: expected the row with index {num_rows}, found "
                    f"{line[:60].decode(errors='replace')!r}; repair the file, or start again "
                    "with --overwrite"
                )
            num_rows += 1
            end += len(line)
        self._file.truncate(end)
        return num_rows


def manifest_path(rows: Path) -> Path:
    """Return the path of a row file's manifest."""
    return rows.with_name(rows.name + _MANIFEST)


def is_row_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of an existing row file."""
    rows = path.with_name(path.name.removesuffix(_MANIFEST))
    return rows != path and rows.is_file()


def first_difference(there: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return the first difference of two manifests, as "seed 0, not 1"; None if they agree."""
    # Nothing else of an unknown format is read.
    if there.get("format") != wanted["format"]:
        return f"manifest format {there.get('format')}, not {wanted['format']}"
    if not there.keys() >= wanted.keys():
        return "a manifest that lacks settings"

    # Settings first: another flag often changes the prompts too, and its name helps more.
    before, now = there["settings"], wanted["settings"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            return f"{name} {before.get(name)!r}, not {now.get(name)!r}"
    if there["prompts_hash"] != wanted["prompts_hash"]:
        return "other prompts"
    return None
