"""Files with rows or text: which there are in a folder, and what is read of each."""

from __future__ import annotations

import collections
import glob
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.data.forms import is_row
from clover_jax.data.records import open_rows, plain_name, shown
from clover_jax.errors import UserError, reason_of
from clover_jax.runtime.files import unique_keys
from clover_jax.runtime.progress import say
from clover_jax.runtime.row_writer import is_row_manifest

TABLES = (".parquet", ".arrow")
# Endings of other files with data, which as text would teach commas, or nothing.
NOT_READ = frozenset(
    (
        *(".csv", ".tsv", ".xlsx", ".xls", ".ods", ".feather", ".orc", ".avro", ".sqlite", ".db"),
        *(".duckdb", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".bin"),
        *(".safetensors", ".tfrecord", ".msgpack", ".bson", ".zip", ".tar", ".tgz", ".7z", ".rar"),
        *(".lz4", ".br", ".lzma", ".snappy", ".pdf", ".doc", ".docx"),
    )
)
# Files that tell of data: cards and licenses, and what `datasets` writes next to its tables.
_CARDS = ("readme", "license", "licence", "citation", "notice", "changelog", "contributing")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# Of a row, or of a list of rows, whole or torn.
_ROW_BEGINNING = re.compile(
    r'\s*[\[{].*?"(messages|conversations|response|completion|output|output_ids)"\s*:', re.DOTALL
)

# A row's place, "a.jsonl:3" for example, and its value, or the bytes of a line of JSON.
Rows = Iterable[tuple[str, Any]]


class Files(NamedTuple):
    """The files of one path of --data.

    is_named: whether the user named that very file, which must then be readable.
    left_out: ending -> number of files that hold no text to read.
    """

    paths: list[Path]
    is_named: bool
    left_out: collections.Counter[str]


def find_files(part: str) -> Files:
    """Return the files of a file's name, a folder or a glob; raises UserError where none are."""
    path = Path(part).expanduser()
    left_out: collections.Counter[str] = collections.Counter()
    if path.is_file():
        check_readable(path)
        return Files([path], True, left_out)
    if path.exists() and not path.is_dir():
        raise UserError(f"--data={part} is neither a file nor a folder; write its rows to a file")

    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    files = []
    for file in sorted(found):
        below = str(file.relative_to(path)) if path.is_dir() else file.name
        # Files and folders such as .git hold no data.
        if re.search(r"(^|/)\.", below):
            left_out["hidden"] += file.is_file()
        elif not file.is_file():
            # Folders are walked through, but not those that links lead to.
            left_out["links and the like"] += file.is_symlink() or not file.is_dir()
        elif is_row_manifest(file):
            pass  # lies next to rows that `generate` wrote, and is part of them
        elif Path(plain_name(file)).suffix in NOT_READ:
            left_out[ending(file)] += 1
        else:
            files.append(file)
    if not files and not left_out.total():
        raise UserError(f"--data={part}: no such file, and no folder or glob with files in it")
    return Files(files, False, left_out)


def ending(path: Path) -> str:
    """Return the ending of a file's name without its packing, and the name where it has none."""
    return Path(plain_name(path)).suffix or path.name


def check_readable(path: Path) -> None:
    """Raise UserError for a file whose ending says that it is not read."""
    suffix = Path(plain_name(path)).suffix
    if suffix in NOT_READ:
        raise UserError(
            f"{path}: {suffix} files are not read; give .jsonl with one object a line, a list in "
            f".json, {' or '.join(TABLES)}, or plain text"
        )


def is_about_data(path: Path) -> bool:
    """Return whether a file tells of the data next to it: a card, a license, metadata."""
    return path.stem.lower() in _CARDS or path.name in _METADATA


def read_file(path: Path) -> Rows | str:
    """Return the rows of a file, read one by one where it is large, or its text.

    Raises UserError for a file that is not whole, UnicodeDecodeError for one that is not text.
    """
    if path.suffix.lower() in TABLES:
        return table_rows(path)
    # Read line by line; other files show their form only as a whole.
    if plain_name(path).endswith(".jsonl"):
        return _lines(path)
    with open_rows(path) as file:
        text = file.read().decode("utf-8-sig")
    rows = _rows_in(path, text)
    return text if rows is None else rows


def table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, such as `datasets` saves.

    Raises UserError without the package that reads it, and for a file that is not whole.
    """
    number = 0
    for batch in _batches(path):
        for row in batch.to_pylist():
            number += 1
            # What JSON lacks is text, such as a time, or no text, such as a picture.
            text = json.dumps(
                row, default=lambda x: {"bytes": len(x)} if isinstance(x, bytes) else str(x)
            )
            yield f"{path}:{number}", json.loads(text)


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a file."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: {path.suffix} files need pyarrow, which is not installed: pip install "
            "'clover-jax[parquet]', or write the rows as .jsonl"
        ) from None

    try:
        if path.suffix.lower() == ".parquet":
            yield from pyarrow.parquet.ParquetFile(str(path)).iter_batches(batch_size=256)
            return
        with pyarrow.OSFile(str(path), "rb") as file:
            # `datasets` writes Arrow's stream format, others its file format.
            is_stream = file.read(6) != b"ARROW1"
            file.seek(0)
            if is_stream:
                yield from pyarrow.ipc.open_stream(file)
            else:
                reader = pyarrow.ipc.open_file(file)
                yield from map(reader.get_batch, range(reader.num_record_batches))
    except (pyarrow.ArrowException, OSError) as error:
        kind = path.suffix.lower().removeprefix(".").title()
        raise UserError(f"{path}: not a whole {kind} file ({reason_of(error)})") from error


def _lines(path: Path, text: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield (source, line) of the lines of a JSONL file, or its text, that are not empty."""
    with open_rows(path) if text is None else io.BytesIO(text.encode()) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _rows_in(path: Path, text: str) -> Iterable[tuple[str, Any]] | None:
    """Return the (source, row) pairs in a file that is not named .jsonl; None for a plain text.

    Rows may be a list, a list in an object, one object, or JSONL under another name.
    Raises UserError for a text that looks like rows and cannot be read as such: it would be trained
    on as it stands, marks and names of fields included.
    """
    if not text.lstrip().startswith(("[", "{")):
        return None
    is_json = plain_name(path).endswith(".json")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        # Several values one a line, something torn, or no JSON at all.
        first, *others = filter(str.strip, text.split("\n"))
        if _holds_row(first) or (is_json and others and _holds_row(first, of_any_kind=True)):
            return _lines(path, text)
        if _ROW_BEGINNING.match(text, 0, 10_000):
            raise UserError(
                f"{path}: looks like rows, but is not JSON ({error}); expected one object a line "
                "(.jsonl), or a list of objects (.json)"
            ) from None
        return None

    if is_row(value):
        return [(str(path), value)]
    if isinstance(value, dict):
        # {"data": [...]} and the like.
        lists = {name: rows for name, rows in value.items() if _are_rows(rows)}
        others = [name for name in value if name not in lists and value[name] is not None]
        if lists and others:
            say(
                f"{path}: rows are read from {', '.join(lists)}; {len(others)} other keys are not: "
                f"{shown(others)}"
            )
        return [
            (f"{path}[{n}][{i}]", row) for n, rows in lists.items() for i, row in enumerate(rows)
        ] or None
    # A .json list of other objects is a mistake, which parsing its rows will explain.
    is_list = _are_rows(value) or (is_json and all(isinstance(row, dict) for row in value))
    return [(f"{path}[{number}]", row) for number, row in enumerate(value)] if is_list else None


def _holds_row(line: str, of_any_kind: bool = False) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return is_row(value) or (of_any_kind and isinstance(value, dict))


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and any(map(is_row, value))
