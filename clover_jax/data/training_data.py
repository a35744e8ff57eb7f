"""The data that --data names, ready to train on: files, folders, globs, the built-in corpus, or a
folder that `prepare` made.
"""

from __future__ import annotations

import collections
import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.data.corpus import builtin_documents
from clover_jax.data.forms import is_row, parse_row
from clover_jax.data.prepared import PreparedSamples, heldout_rows, is_prepared
from clover_jax.data.records import (
    Record,
    Text,
    data_hash,
    json_hash,
    open_rows,
    parse_line,
    plain_name,
    split_by_hash,
    tell_unread,
)
from clover_jax.data.samples import RecordSamples, Samples, look_at
from clover_jax.data.tokenizer import template_hash, tokenizer_hash
from clover_jax.errors import UserError
from clover_jax.runtime.row_writer import is_row_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingData(NamedTuple):
    """Data of a run: samples to train on, and records that are never trained on.

    identity: the hashes that the samples depend on, the same for raw and for prepared data: "data"
        (the records), "tokenizer", "chat_template", and "activations" of a cached teacher. A run
        that goes on must find them unchanged.
    """

    samples: Samples
    heldout: Sequence[Record]
    identity: dict[str, str | None]

    @property
    def hash(self) -> str:
        """Hash of the records that are trained on."""
        return str(self.identity["data"])

    @property
    def tokens_only(self) -> Samples:
        """The same samples without activations, which would be large to read for nothing."""
        samples = self.samples
        # Raw samples have no activations, and a folder opened without names reads none.
        if isinstance(samples, PreparedSamples) and samples.hidden_names:
            return PreparedSamples(samples.directory)
        return samples


def load_training_data(
    spec: str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    seq_len: int,
    hidden_names: tuple[str, ...] = (),
    eos_token_ids: tuple[int, ...] = (),
) -> TrainingData:
    """Open the data; say on stderr what should be known of it.

    hidden_names: activations that the samples must bring along.
    Raises UserError for data that cannot be understood, teach nothing, or are of another tokenizer.
    """
    if is_prepared(spec):
        return _load_prepared(Path(spec).expanduser(), tokenizer, vocab_size, seq_len, hidden_names)
    if hidden_names:
        raise UserError(
            f"--data={spec} has no cached activations; make them with `prepare --features=...` and "
            "give its --output as --data"
        )

    records = read_records(spec)
    samples = RecordSamples(records.train, tokenizer, vocab_size, seq_len, eos_token_ids)
    # Tokenising all would take as long as `prepare`; a look at some finds most mistakes.
    look_at(samples).judge(samples)
    identity = sample_identity(data_hash(records.train), tokenizer)
    return TrainingData(samples, records.heldout, identity)


def _load_prepared(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    seq_len: int,
    hidden_names: tuple[str, ...],
) -> TrainingData:
    samples = PreparedSamples(directory, hidden_names)
    made_from = samples.made_from

    # The folder must hold the very samples that the raw data would give now. A base without
    # tokenizer files takes anybody's token ids.
    ours = tokenizer_hash(tokenizer) if tokenizer is not None else None
    theirs = made_from["tokenizer"]
    if theirs is not None and ours is not None and theirs != ours:
        raise UserError(
            f"{directory} was prepared with another tokenizer than the base's: {theirs[:12]} "
            f"against {ours[:12]}; give the base that it was prepared for, or prepare it again"
        )
    # Plain text is the same with every template.
    if samples.counts["conversations"] and made_from["chat_template"] != template_hash(tokenizer):
        raise UserError(
            f"{directory} was prepared with another chat template than the one in use now; give "
            "the --chat_template that it was prepared with, or prepare it again"
        )
    # A larger vocabulary than the folder's has all of its ids.
    if made_from["vocab_size"] > vocab_size:
        raise UserError(
            f"{directory} was prepared for a vocabulary of {made_from['vocab_size']} tokens and "
            f"the base has {vocab_size}; give the base that it was prepared for, or prepare it "
            "again"
        )
    if made_from["seq_len"] != seq_len:
        raise UserError(
            f"{directory} was prepared with --seq_len={made_from['seq_len']}, not {seq_len}; give "
            "that, or prepare the data again"
        )

    identity = {
        "data": made_from["data_hash"],
        "tokenizer": theirs,
        "chat_template": made_from["chat_template"],
    }
    # A run may not resume with another base's activations: they are other data.
    if hidden_names:
        identity["activations"] = json_hash(samples.hidden_made_from)
    return TrainingData(samples, heldout_rows(directory), identity)


def sample_identity(
    records_hash: str, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, str | None]:
    """Return the hashes of everything that turns records into samples."""
    return {
        "data": records_hash,
        "tokenizer": tokenizer_hash(tokenizer) if tokenizer is not None else None,
        "chat_template": template_hash(tokenizer),
    }


BUILTIN = "builtin:python"
MOST_NAMED = 8  # rows that cannot be read
# Of a row, or of a list of rows, whole or torn.
_ROW_BEGINNING = re.compile(
    r'\s*[\[{].*?"(messages|conversations|response|output_ids)"\s*:', re.DOTALL
)


class Records(NamedTuple):
    """The records of --data: to train on, and some that are never trained on."""

    train: list[Record]
    heldout: list[Record]


def read_records(spec: str) -> Records:
    """Read training data: the records of paths, separated by commas.

    A path is a text file (one document), a .jsonl file (also .gz, .xz; see `parse_row`), a .json
    file with a list of such rows, a folder or a glob of them, or "builtin:python", the Python
    standard library, whose held-out modules are the built-in base's too.
    Raises UserError for a path without data or a row that cannot be understood, naming it.
    """
    # The corpus has a split of its own; other records are split by their content.
    train: list[Record] = []
    heldout: list[Record] = []
    others: list[Record] = []
    unread: collections.Counter[str] = collections.Counter()
    for part in filter(None, (part.strip() for part in spec.split(","))):
        if part == BUILTIN:
            train += [Text(d.name, d.text) for d in builtin_documents("train")]
            heldout += [Text(d.name, d.text) for d in builtin_documents("heldout")]
        elif part.startswith("builtin:"):
            raise UserError(f"--data={part} is unknown; the built-in corpus is {BUILTIN}")
        else:
            # Its shards are no text, and its regenerated rows would be trained on a second time.
            if is_prepared(part):
                raise UserError(
                    f"--data: {part} was made by `prepare`: it is tokenised already, and its files "
                    "are no texts; give it to `train`, alone"
                )
            for path, is_named in _find_files(part):
                others += _read_file(path, is_named, unread)
    tell_unread(unread, f"--data={spec}")

    # Split over all files together: each may have too few records, all of them enough.
    others_train, others_heldout = split_by_hash(others)
    records = Records(train + others_train, heldout + others_heldout)
    if not records.train:
        raise UserError(f"--data={spec} holds no records; give text or JSONL files, or {BUILTIN}")
    return records


def _find_files(part: str) -> list[tuple[Path, bool]]:
    """Return (path, whether the user named that very file) for a file, a folder or a glob."""
    # A file that the user names must be readable; others may be pictures, say.
    path = Path(part).expanduser()
    if path.is_file():
        return [(path, True)]
    if path.is_dir():
        # Files and folders such as .git hold no data.
        hidden = re.compile(r"(^|/)\.")
        below = (p for p in path.rglob("*") if not hidden.search(str(p.relative_to(path))))
    else:
        below = (p for p in map(Path, glob.glob(str(path), recursive=True)) if p.name[0] != ".")
    # Manifests of row files lie next to the rows, and are not data.
    files = sorted(p for p in below if p.is_file() and not is_row_manifest(p))
    if not files:
        raise UserError(f"--data={part}: no such file, and no folder or glob with files in it")
    return [(file, False) for file in files]


def _read_file(path: Path, is_named: bool, unread: collections.Counter[str]) -> Iterator[Record]:
    with open_rows(path) as file:
        # Read line by line; other files show their form only as a whole.
        if plain_name(path).endswith(".jsonl"):
            yield from _parse_rows(_lines(path, file), unread)
            return
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if is_named:
                raise UserError(f"{path}: not UTF-8 text ({error})") from None
            return  # a picture or an archive in a folder of texts

    rows = _rows_in(path, text)
    if rows is not None:
        yield from _parse_rows(rows, unread)
    elif text.strip():
        yield Text(str(path), text)


def _parse_rows(
    rows: Iterable[tuple[str, Any]], unread: collections.Counter[str]
) -> Iterator[Record]:
    """Yield the records of rows: values, or bytes of JSON.

    Raises UserError at the end, naming all rows that cannot be read.
    """
    refused: dict[str, UserError] = {}
    for source, row in rows:
        try:
            value = parse_line(row, source) if isinstance(row, bytes) else row
            yield from parse_row(value, source, unread)
        except UserError as error:
            refused[source] = error

    if refused:
        first, *others = refused
        more = f"{', '.join(others[:MOST_NAMED])}{', ...' if len(others) > MOST_NAMED else ''}"
        also = f"; {len(others)} more cannot be read: {more}" if others else ""
        raise UserError(f"{refused[first]}{also}")


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield (source, line) of the lines of a JSONL file that are not empty."""
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
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Several values one a line, something torn, or no JSON at all.
        first, *others = filter(str.strip, text.split("\n"))
        if _holds_row(first) or (is_json and others and _holds_row(first, of_any_kind=True)):
            return _lines(path, text.encode().split(b"\n"))
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
