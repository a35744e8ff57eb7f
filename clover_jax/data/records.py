"""Rows of files, for prompts and training data, and the records that training rows hold."""

from __future__ import annotations

import bz2
import collections
import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import unique_keys
from clover_jax.runtime.progress import say

HELDOUT_FRACTION = 0.05
# Fewer records than this are all trained on: a hash could hold out most of a handful.
MIN_RECORDS_FOR_HELDOUT = 20

# A message as chat templates read it: role, content, and whatever else the row says.
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Text:
    """Plain text, or a section of it; the base is imitated on all of it.

    starts, ends: whether the document's first and last characters are in it.
    """

    source: str
    text: str
    starts: bool = True
    ends: bool = True


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages; the base is imitated on what the assistant says.

    variables: what else the chat template may read, tools for example.
    unlearned: numbers of the assistant's messages that the row wants not to be learned.
    """

    source: str
    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlearned: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenRow:
    """Token ids as `generate --output` writes them; the base is imitated on output_ids."""

    source: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


# Tokens that the base reads before it answers, in a later turn only the new ones; and its answer.
Turn = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class TokenTurns:
    """A conversation of several answers as token ids; the base is imitated on the answers."""

    source: str
    turns: tuple[Turn, ...]


Record = Text | Conversation | TokenRow | TokenTurns


def join_turns(turns: Sequence[Turn]) -> tuple[Turn, ...] | None:
    """Return turns with only the tokens that are new to each; None where one rewrites the past.

    Example: ((1,), (2,)), ((1, 2, 3), (4,)) gives ((1,), (2,)), ((3,), (4,)).
    """
    joined: list[Turn] = []
    read: tuple[int, ...] = ()
    for prompt, output in turns:
        # A template may drop past answers' thinking: then a prompt does not continue the last turn.
        if prompt[: len(read)] != read:
            return None
        joined.append((prompt[len(read) :], output))
        read = prompt + output
    return tuple(joined)


def content_hash(record: Record) -> str:
    """Return SHA-256 of a record's content; its source does not matter."""
    # The same text under another name is the same data.
    content = dataclasses.asdict(record) | {"source": None}
    if isinstance(record, Conversation) and not record.variables and not record.unlearned:
        content = {"source": None, "messages": record.messages}
        # Pairs: messages of text alone keep the hash, and their side of the split, of the past.
        if all(set(one) == {"role", "content"} for one in record.messages):
            content["messages"] = [(one["role"], one["content"]) for one in record.messages]
    return json_hash(content)


def data_hash(records: Iterable[Record]) -> str:
    """Return a hash of all records in order: the identity of a run's data."""
    # In order, since samples are numbered and shuffled by their place.
    digest = hashlib.sha256()
    for record in records:
        digest.update(content_hash(record).encode())
    return digest.hexdigest()


def split_by_hash(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return (training, held-out) records; a record's side depends on its content alone."""
    if len(records) < MIN_RECORDS_FOR_HELDOUT:
        return list(records), []
    # By content: rows that are added or shuffled move no other row to the other side.
    heldout = [int(content_hash(r)[:8], 16) < HELDOUT_FRACTION * 2**32 for r in records]
    return (
        [record for record, out in zip(records, heldout, strict=True) if not out],
        [record for record, out in zip(records, heldout, strict=True) if out],
    )


def cut_text(record: Text, max_chars: int) -> list[Text]:
    """Cut a long text into sections, at the last line end (or else anywhere) before max_chars.

    Example: "ab\\ncd\\ne" with max_chars 4 gives "ab\\n", "cd\\ne".
    """
    sections, start, text = [], 0, record.text
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            # A line longer than a section has no end to cut at.
            line_end = text.rfind("\n", start, end) + 1
            end = line_end if line_end > start else end
        ends = end >= len(text) and record.ends
        # Only the document's own ends get BOS and EOS, not the cuts.
        starts = start == 0 and record.starts
        sections.append(Text(record.source, text[start:end], starts, ends))
        start = end
    return sections


STANDARD_INPUT = Path("-")
# They say where a row is from, not what to do with it.
LABELS = frozenset(
    ("id", "index", "question_id", "prompt_id", "category", "source", "answer", "reference")
)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_PACKED = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}


def plain_name(path: Path) -> str:
    """Return a file's name in lower case without its packing: "a.JSONL.gz" is "a.jsonl"."""
    name = path.name.lower()
    return name.removesuffix(path.suffix.lower()) if path.suffix.lower() in _PACKED else name


@contextlib.contextmanager
def open_rows(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacked where its name ends in .gz, .xz, .bz2 or .zst.

    "-" is standard input. Raises UserError where the packed file is broken, OSError where there is
    none.
    """
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer  # stays open: it is not ours
        return
    suffix = path.suffix.lower()
    broken: tuple[type[Exception], ...] = (OSError, lzma.LZMAError, zlib.error, EOFError)
    opener = _OPENERS.get(suffix, open)
    if suffix == ".zst":
        zstd = _zstd(path)
        opener, broken = zstd.open, (*broken, zstd.ZstdError)
    try:
        with opener(path, "rb") as file:
            yield file
    except broken as error:
        # The system's own errors have a number, errors of broken content have none.
        if suffix not in _PACKED or getattr(error, "errno", None):
            raise
        raise UserError(f"{path}: not a whole {_PACKED[suffix]} file ({error})") from None


def _zstd(path: Path) -> Any:
    """Return the module that reads zstd: Python 3.14 has it, others by a package."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise UserError(
        f"{path}: .zst files need backports.zstd, which is not installed: pip install "
        "'clover-jax[parquet]', or unpack the file"
    )


def parse_line(line: bytes, source: str) -> Any:
    """Return the JSON value of one line; raises UserError naming `source` for none."""
    # Some editors begin a file with a byte-order mark, which utf-8-sig drops.
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text ({error})") from None
    except RecursionError:
        raise UserError(f"{source}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise UserError(f"{source}: not JSON ({error}); expected one object a line") from None


def tell_unread(fields: collections.Counter[str], source: str) -> None:
    """Say which fields of rows, labels apart, are not read: they may be misspelled."""
    unread = [(name, count) for name, count in fields.most_common() if name not in LABELS]
    # Only the most frequent fields: other kinds of data may have hundreds.
    listed = [f"{shown(n)} ({c} {'row' if c == 1 else 'rows'})" for n, c in unread[:9]]
    if len(unread) > len(listed):
        listed.append(f"and {len(unread) - len(listed)} more")
    if listed:
        say(f"{source}: fields that are not read: {', '.join(listed)}")


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
        text = json.dumps(value, default=repr)
        return f"{text if len(text) <= 60 else text[:57] + '...'}, which holds half a character"
    return text if len(text) <= 60 else text[:57] + "..."
