"""Files of rows, for prompts and training data: opening, lines of JSON, checks and hashes."""

from __future__ import annotations

import collections
import contextlib
import gzip
import hashlib
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

STANDARD_INPUT = Path("-")
# They say where a row is from, not what to do with it.
LABELS = frozenset(
    ("id", "index", "question_id", "prompt_id", "category", "source", "answer", "reference")
)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def plain_name(path: Path) -> str:
    """Return a file's name in lower case without the ending of a packed file.

    Example: "Chats.JSONL.gz" is "chats.jsonl".
    """
    name = path.name.lower()
    return name.removesuffix(path.suffix.lower()) if path.suffix.lower() in _OPENERS else name


@contextlib.contextmanager
def open_rows(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacked where its name ends in .gz or .xz; "-" is standard input.

    Raises UserError where the packed file is broken, OSError where there is none.
    """
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer  # stays open: it is not ours
        return
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        kind = {".gz": "gzip", ".xz": "xz"}[path.suffix.lower()]
        raise UserError(f"{path}: not a whole {kind} file ({error})") from None


def parse_line(line: bytes, source: str) -> Any:
    """Return the JSON value of one line.

    Raises UserError naming `source` for a line that is none.
    """
    # Some editors begin a file with a byte-order mark, which utf-8-sig drops.
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error})") from None
    except RecursionError:
        raise UserError(f"{source}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise UserError(f"{source}: not JSON ({error}); expected one object a line") from None


def tell_unread(fields: collections.Counter[str], source: str) -> None:
    """Say on stderr which fields of rows no command reads, and in how many rows each is.

    Fields that only label a row are left out; the others may be misspelt.
    """
    unread = [(name, count) for name, count in fields.most_common() if name not in LABELS]
    # Only the most frequent fields: other kinds of data may have hundreds.
    listed = [f"{shown(n)} ({c} {'row' if c == 1 else 'rows'})" for n, c in unread[:9]]
    if len(unread) > len(listed):
        listed.append("...")
    if listed:
        say(f"{source}: no command reads {', '.join(listed)}")


def is_text(value: Any) -> bool:
    r"""Return whether a JSON value is a string that UTF-8 can hold.

    Example: "a\ud83d", an emoji that was cut in half, is not.
    """
    if not isinstance(value, str):
        return False
    # JSON may hold half of a pair of surrogates, which no tokenizer takes.
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_hash(value: Any) -> str:
    """Return SHA-256 of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shown(value: Any) -> str:
    """Return a JSON value for a message to the user, in about 60 characters at most."""
    # As the user wrote it, where that can be printed.
    text = json.dumps(value, ensure_ascii=False, default=repr)
    if not is_text(text):
        # Escaped, or the message itself could not be printed.
        return f"{_shortened(json.dumps(value, default=repr))}, which holds half a character"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
