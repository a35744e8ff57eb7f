"""A file of output rows that a stopped run can resume.

`OUTPUT` has one row a line, in input order, each flushed when written; a torn last line is dropped.
`OUTPUT.manifest.json` has the settings and the prompts of the rows, so that the same command
resumes and any other is refused.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.storage.files import lock, naming, write_json
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.jsonl import read_rows, to_json

_FORMAT = 1
_SECONDS_BETWEEN_NOTES = 1.0


class RowWriter:
    """Append rows in input order to a file that the same command can resume.

    Rows may come in any order: an early one is held in memory until those before it are written.
    Use it as a context manager; `finished` rows of earlier runs need not be made again.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        settings: dict[str, Any],
        prompts_hash: str,
        overwrite: bool = False,
        first: int = 0,
        shard: dict[str, int] | None = None,
    ):
        """Open `path` for appending, after the rows that an earlier run has left.

        settings: what the rows depend on, as JSON values. prompts_hash: identifies the input rows.
        overwrite: start anew whatever is there; it stays until the first row replaces it.
        first: index of the first row, where other files have those before it.
        shard: which part of all rows that is, for the manifest (`row_shards.py`); None for all.
        Raises UserError where `path` holds rows of other settings or prompts, rows without a
        manifest, or is being written by another process.
        """
        self.path, self._first = Path(path), first
        self._manifest_path = manifest_path(self.path)
        # Place within the file -> row that waits for those before it.
        self._waiting: dict[int, dict[str, Any]] = {}
        self._replaces, self._noted = overwrite, 0.0
        manifest = {"format": _FORMAT, "prompts_hash": prompts_hash, "settings": settings}
        if shard is not None:
            manifest["shard"] = shard
        self._manifest = json.loads(to_json(manifest))  # tuples become lists, as they will be read
        # A device or a pipe keeps no rows that could be read back.
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise UserError(f"{self.path} is no file that rows can be kept in; name one")

        # Opened for appending before it is locked: what another process writes there stays.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            if not lock(self._file):
                raise UserError(
                    f"{self.path} is being written by another process; wait for it or give another "
                    "--output"
                )
            self.finished, self.earlier_seconds = 0, 0.0
            if not overwrite:
                # The manifest first: rows are read only where they are this command's.
                self._resume_manifest()
                write_json(self._manifest_path, self._manifest)
                self.finished = self._drop_torn_line()
        except BaseException:
            self._file.close()
            raise

    def kept(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of earlier runs that this one resumes."""
        # With `overwrite` the old rows stay until the first new row, and are not kept.
        if not self._replaces:
            yield from read_rows(self.path)

    def append(self, row: dict[str, Any]) -> None:
        """Write `row`, whose "index" is its place in the input, once all before it are written."""
        place = row["index"] - self._first
        if place < self.finished or place in self._waiting:
            raise ValueError(f"row {row['index']} of {self.path} was written before")
        self._waiting[place] = row

        # Write all rows that now have all their predecessors, often none.
        if self.finished in self._waiting:
            self._replace()
        while self.finished in self._waiting:
            line = to_json(self._waiting.pop(self.finished))
            with naming(self.path):
                self._file.write(line.encode() + b"\n")
                self._file.flush()
            self.finished += 1

    def note_seconds(self, seconds: float) -> None:
        """Record for how long this run has worked, so that a resumed run can count it too.

        Writes once a second at most, and at the end: a killed run loses no more than that.
        """
        self._manifest["seconds"] = self.earlier_seconds + seconds
        if not self._replaces and time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:
            self._noted = time.monotonic()
            write_json(self._manifest_path, self._manifest)

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, exception_type: type | None, *rest: object) -> None:
        if exception_type is None:
            self._replace()  # by no rows, where none came
        if "seconds" in self._manifest and not self._replaces:
            write_json(self._manifest_path, self._manifest)
        self._file.close()
        # A run that ended well has lost a row; one that failed has other worries.
        if exception_type is None and self._waiting:
            raise ValueError(
                f"row {self._first + self.finished} of {self.path} never came, "
                f"but {len(self._waiting)} rows after it did"
            )

    def _replace(self) -> None:
        """Empty the file that is to be overwritten, once there is a row to write."""
        if self._replaces:
            self._file.truncate(0)
            write_json(self._manifest_path, self._manifest)
            self._replaces = False

    def _resume_manifest(self) -> None:
        """Refuse rows of another command, and take over the seconds that went into these."""
        # Opened for appending, the file stands at its end: 0 is an empty one, anybody's.
        if self._file.tell() == 0:
            return
        # Rows of an unknown origin are never appended to, and never deleted unasked.
        if not self._manifest_path.is_file():
            raise UserError(
                f"{self.path} exists and has no manifest to resume from; "
                "give another --output, or --overwrite to start anew"
            )
        try:
            before = read_json_object(self._manifest_path)
        except UserError as error:
            raise UserError(f"{error}; --overwrite starts anew") from error

        difference = first_difference(before, self._manifest)
        if difference:
            raise UserError(
                f"{self.path} was written with {difference}; "
                "repeat that command to resume it, give another --output, or --overwrite"
            )
        # A run that was killed early has noted none.
        seconds = before.get("seconds")
        if isinstance(seconds, int | float):
            self._manifest["seconds"] = self.earlier_seconds = seconds

    def _drop_torn_line(self) -> int:
        """Cut what follows the last newline and return how many rows remain."""
        self._file.seek(0)
        num_rows = end = 0
        # A kill tears the last line only; anything else is damage that a user must see.
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            num_rows += 1
            check_index(line, self._first + num_rows - 1, self.path, num_rows)
            end += len(line)
        self._file.truncate(end)
        return num_rows


_MANIFEST = ".manifest.json"


def manifest_path(rows: Path) -> Path:
    """Return where the manifest of a row file lies."""
    return rows.with_name(rows.name + _MANIFEST)


def is_row_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of a row file beside it."""
    rows = path.with_name(path.name.removesuffix(_MANIFEST))
    return rows != path and rows.is_file()


def check_index(line: bytes, expected: int, path: Path, number: int) -> None:
    """Raise UserError, naming the line's number, where a line is not the row with this index."""
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError):
        index = None
    # Rows are in input order without a gap, so each index is known.
    if index != expected:
        raise UserError(
            f"{path}:{number}: expected the row with index {expected}, found "
            f"{line[:60].decode(errors='replace')!r}; repair the file, or --overwrite to start anew"
        )


def first_difference(there: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return the first difference of two manifests, as "seed 0, not 1"; None where they agree."""
    # Another format may mean anything, so nothing else of it is read.
    if there.get("format") != wanted["format"]:
        return f"manifest format {there.get('format')}, not {wanted['format']}"
    if not there.keys() >= wanted.keys():
        return "a manifest that lacks settings"

    # Settings first: other flags often mean other prompts too, and a flag can be named.
    before, now = there["settings"], wanted["settings"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            return f"{name} {before.get(name)!r}, not {now.get(name)!r}"
    if there["prompts_hash"] != wanted["prompts_hash"]:
        return "other prompts"
    if there.get("shard") != wanted.get("shard"):
        return f"shard {there.get('shard')}, not {wanted.get('shard')}"
    return None
