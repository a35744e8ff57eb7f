"""Rows of files, for prompts and training data, and the records that training rows hold."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import hashlib
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

HELDOUT_FRACTION = 0.05
# Fewer records than this are all trained on: a hash could hold out most of a handful.
MIN_RECORDS_FOR_HELDOUT = 20

# The keys that each form of a row must have, in the order in which `parse_row` tries them.
_FORMS = (
    {"prompt_ids", "output_ids"},
    {"messages"},
    {"conversations"},
    {"prompt", "response"},
    {"text"},
)
# Those of the forms, and whatever else is in a row that `generate` wrote.
READ_FIELDS = frozenset().union(*_FORMS) | {
    *("error", "skipped", "accepted", "target_forwards", "tau", "seconds", "finish_reason"),
}
# Names of speakers in the wild -> roles of chat templates.
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
    "system": "system",
    "tool": "tool",
}


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
    """Messages, as (role, content); the base is imitated on what the assistant says."""

    source: str
    messages: tuple[tuple[str, str], ...]


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


def is_row(value: Any) -> bool:
    """Return whether a JSON value is an object with the keys of a row that `parse_row` reads."""
    return isinstance(value, dict) and any(keys <= value.keys() for keys in _FORMS)


def parse_row(row: Any, source: str) -> list[Record]:
    """Return the records of one JSONL row, none of an error's; raises UserError naming `source`."""
    if not isinstance(row, dict):
        raise UserError(f"{source}: expected an object, found {type(row).__name__}")
    if row.get("error") or row.get("skipped"):  # of those that `generate` writes
        return []

    try:
        # Token ids first: rows of `generate` also have the text, which is not tokenised again.
        if "prompt_ids" in row and "output_ids" in row:
            return _token_rows(row, source)
        if "messages" in row:
            pairs = [(message["role"], message["content"]) for message in row["messages"]]
        elif "conversations" in row:
            pairs = []
            for message in row["conversations"]:
                speaker = message["from"]
                if speaker not in _SHAREGPT_ROLES:
                    known = ", ".join(_SHAREGPT_ROLES)
                    raise UserError(
                        f"{source}: a message is from {speaker!r}; it may be from {known}"
                    )
                pairs.append((_SHAREGPT_ROLES[speaker], message["value"]))
        elif "prompt" in row and "response" in row:
            pairs = [("user", row["prompt"]), ("assistant", row["response"])]
        # Last: rows of other forms may have a text as well.
        elif "text" in row:
            return [Text(source, _text(row["text"]))]
        else:
            raise UserError(
                f"{source}: expected prompt and response, messages, conversations, text, or "
                f"prompt_ids and output_ids; found {', '.join(map(repr, row)) or 'nothing'}"
            )
        messages = tuple((_text(role), _text(content)) for role, content in pairs)
        return [Conversation(source, messages)]
    except UserError:
        raise  # says all there is to say
    # A message without a role, a number in the place of a list: whatever the row's shape breaks.
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{source}: a malformed row: {error!r}") from None


def _token_rows(row: dict[str, Any], source: str) -> list[Record]:
    prompts, outputs = row["prompt_ids"], row["output_ids"]
    # With several turns each value is a list, one entry a turn.
    if not (outputs and isinstance(outputs[0], list)):
        prompts, outputs = [prompts], [outputs]
    turns = []
    for prompt, output in zip(prompts, outputs, strict=True):
        if not all(isinstance(token, int) and token >= 0 for token in [*prompt, *output]):
            raise UserError(f"{source}: prompt_ids and output_ids must be lists of token ids")
        turns.append((tuple(prompt), tuple(output)))

    joined = join_turns(turns)
    if joined is None:  # a template that drops past thinking: every turn is a row of its own
        return [TokenRow(source, *turn) for turn in turns]
    return [TokenTurns(source, joined) if len(joined) > 1 else TokenRow(source, *joined[0])]


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


def _text(value: Any) -> str:
    if not is_text(value):
        raise TypeError(f"expected text, found {value!r}")
    return value


def content_hash(record: Record) -> str:
    """Return SHA-256 of a record's content; its source does not matter."""
    # The same text under another name is the same data.
    return json_hash(dataclasses.asdict(record) | {"source": None})


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
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def plain_name(path: Path) -> str:
    """Return a file's name in lower case without its packing: "a.JSONL.gz" is "a.jsonl"."""
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
    """Return the JSON value of one line; raises UserError naming `source` for none."""
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
    """Say which fields of rows, labels apart, no command reads: they may be misspelt."""
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
        text = json.dumps(value, default=repr)
        return f"{text if len(text) <= 60 else text[:57] + '...'}, which holds half a character"
    return text if len(text) <= 60 else text[:57] + "..."
