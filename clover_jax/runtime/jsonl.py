"""JSON, one value a line: NumPy's numbers allowed, NaN as null, a torn last line dropped."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import atomic_file, naming


def to_json(value: Any) -> str:
    """Return `value` as one line of JSON, with null for what is not finite.

    NumPy and JAX scalars and arrays become numbers and lists, paths strings.
    """
    return json.dumps(plain_values(value), ensure_ascii=False, allow_nan=False)


def read_rows(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file, less a torn last line; raises UserError for a broken one."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill, or being written at this moment
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not a JSON row ({error})") from None


def append_row(path: str | os.PathLike, row: dict[str, Any]) -> None:
    """Append one row to a JSONL file and flush it."""
    # The name of the file outside, since a full disk may only be noticed when it is closed.
    with naming(path), Path(path).open("a", encoding="utf-8") as file:
        file.write(to_json(row) + "\n")


def keep_rows(path: str | os.PathLike, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file, if it exists, atomically with the rows that `wanted` accepts."""
    # Missing where a run is resumed before its first row was written.
    if not Path(path).exists():
        return
    with atomic_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for row in read_rows(path):
            if wanted(row):
                file.write(to_json(row) + "\n")


def plain_values(value: Any) -> Any:
    """Return `value` with JSON's types only; see `to_json`."""
    # Keys are strings in JSON; other keys become their text.
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # NumPy's and JAX's scalars and arrays, neither of which this module needs to import.
    if hasattr(value, "tolist"):
        return plain_values(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
