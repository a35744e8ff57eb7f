"""Find and read training data: files, folders, globs, the built-in corpus."""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.data.corpus import builtin_documents
from clover_jax.data.prepared import is_prepared
from clover_jax.data.records import Record, Text, parse_row, split_by_hash
from clover_jax.data.rows import open_rows, parse_line, plain_name
from clover_jax.errors import UserError
from clover_jax.storage.row_writer import is_row_manifest

BUILTIN = "builtin:python"


class Records(NamedTuple):
    """What --data holds: records to train on, and some that are never trained on."""

    train: list[Record]
    heldout: list[Record]


def read_records(spec: str) -> Records:
    """Read training data.

    spec: paths separated by commas: text files (one document each), .jsonl files (also .gz, .xz;
        one record a row, see `records.parse_row`), .json files that hold a list of such rows,
        folders (all such files below, manifests of row files apart), globs; or "builtin:python",
        the Python standard library, whose held-out modules are the built-in base's too.
    Raises UserError for a path without data or a row that cannot be understood, naming it.
    """
    train: list[Record] = []
    heldout: list[Record] = []
    others: list[Record] = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        if part == BUILTIN:
            train += [Text(d.name, d.text) for d in builtin_documents("train")]
            heldout += [Text(d.name, d.text) for d in builtin_documents("heldout")]
        elif part.startswith("builtin:"):
            raise UserError(f"--data={part} is unknown; the built-in corpus is {BUILTIN}")
        else:
            _refuse_prepared(part)
            for path, is_named in _find_files(part):
                others += _read_file(path, is_named)
    others_train, others_heldout = split_by_hash(others)
    records = Records(train + others_train, heldout + others_heldout)
    if not records.train:
        raise UserError(f"--data={spec} holds no records; give text or JSONL files, or {BUILTIN}")
    return records


def _find_files(part: str) -> list[tuple[Path, bool]]:
    """Return (path, whether the user named that very file) for a file, a folder or a glob."""
    path = Path(part).expanduser()
    if path.is_file():
        return [(path, True)]
    if path.is_dir():
        found = (p for p in path.rglob("*") if not _is_hidden(p.relative_to(path)))
    else:
        found = (p for p in map(Path, glob.glob(str(path), recursive=True)) if p.name[0] != ".")
    files = sorted(p for p in found if p.is_file() and not is_row_manifest(p))
    if not files:
        raise UserError(f"--data={part}: no such file, and no folder or glob with files in it")
    return [(file, False) for file in files]


def _refuse_prepared(part: str) -> None:
    if is_prepared(part):
        raise UserError(
            f"--data: {part} was made by `prepare`: it is tokenised already, and its files are no "
            "texts; give it to `train`, alone"
        )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_file(path: Path, is_named: bool) -> Iterator[Record]:
    name = plain_name(path)
    try:
        with open_rows(path) as file:
            if name.endswith(".jsonl"):
                yield from _read_jsonl(path, file)
                return
            text = file.read().decode("utf-8")
            if name.endswith(".json"):
                rows = _json_rows(text)
                for number, row in enumerate(rows or ()):
                    yield from parse_row(row, f"{path}[{number}]")
                if rows is not None:
                    return
    except UnicodeDecodeError as error:
        if is_named:
            raise UserError(f"{path}: not UTF-8 text ({error})") from None
        return  # a picture or an archive in a folder of texts
    if text.strip():
        yield Text(str(path), text)


def _json_rows(text: str) -> list[dict[str, Any]] | None:
    """Return the rows of a JSON file that is a list of objects; None for one that is a text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    is_rows = isinstance(value, list) and all(isinstance(row, dict) for row in value)
    return value if is_rows else None


def _read_jsonl(path: Path, file: io.BufferedIOBase) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            source = f"{path}:{number}"
            yield from parse_row(parse_line(line, source), source)
