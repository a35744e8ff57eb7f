"""The data that --data names, ready to train on: files, folders, globs, the built-in corpus, or a
folder that `prepare` made.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clover_jax.data.chat_templates import CLOCK, clock_identity
from clover_jax.data.corpus import builtin_documents
from clover_jax.data.forms import parse_row
from clover_jax.data.prepared import PreparedSamples, heldout_rows, is_prepared
from clover_jax.data.records import (
    Record,
    Text,
    data_hash,
    json_hash,
    parse_line,
    plain_name,
    split_by_hash,
    tell_unread,
)
from clover_jax.data.row_files import NOT_READ, Rows, ending, find_files, is_about_data, read_file
from clover_jax.data.samples import Reading, RecordSamples, Samples, look_at
from clover_jax.data.tokenizer import template_hash, tokenizer_hash
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

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
    spec: str, reading: Reading, hidden_names: tuple[str, ...] = ()
) -> TrainingData:
    """Open the data; say on stderr what should be known of it.

    hidden_names: activations that the samples must bring along.
    Raises UserError for data that cannot be understood, teach nothing, or are of another tokenizer.
    """
    if is_prepared(spec):
        return _load_prepared(Path(spec).expanduser(), reading, hidden_names)
    if hidden_names:
        raise UserError(
            f"--data={spec} has no cached activations; make them with `prepare --features=...` and "
            "give its --output as --data"
        )

    records = read_records(spec)
    samples = RecordSamples(records.train, reading)
    # Tokenizing all would take as long as `prepare`; a look at some finds most mistakes.
    look_at(samples).judge(samples)
    identity = sample_identity(data_hash(records.train), reading.tokenizer)
    return TrainingData(samples, records.heldout, identity)


def _load_prepared(
    directory: Path, reading: Reading, hidden_names: tuple[str, ...]
) -> TrainingData:
    samples = PreparedSamples(directory, hidden_names)
    made_from, tokenizer = samples.made_from, reading.tokenizer

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
    if made_from["vocab_size"] > reading.vocab_size:
        raise UserError(
            f"{directory} was prepared for a vocabulary of {made_from['vocab_size']} tokens and "
            f"the base has {reading.vocab_size}; give the base that it was prepared for, or "
            "prepare it again"
        )
    if made_from["seq_len"] != reading.seq_len:
        raise UserError(
            f"{directory} was prepared with --seq_len={made_from['seq_len']}, not "
            f"{reading.seq_len}; give that, or prepare the data again"
        )

    identity = {
        "data": made_from["data_hash"],
        "tokenizer": theirs,
        "chat_template": made_from["chat_template"],
        **{name: made_from[name] for name in (CLOCK,) if name in made_from},
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
        **clock_identity(tokenizer),
    }


BUILTIN = "builtin:python"
MOST_NAMED = 8  # rows that cannot be read


class Records(NamedTuple):
    """The records of --data: to train on, and some that are never trained on."""

    train: list[Record]
    heldout: list[Record]


def read_records(spec: str) -> Records:
    """Read training data: the records of paths, separated by commas.

    A path is a text file (one document), a .jsonl file (also packed; see `parse_row`), a .json file
    with a list of such rows, a Parquet or Arrow file, a folder or a glob of them, or
    "builtin:python", the Python standard library, whose held-out modules are the built-in base's
    too.
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
            # Its shards are not text, and its regenerated rows would be trained on a second time.
            if is_prepared(part):
                raise UserError(
                    f"--data: {part} was made by `prepare`: it is tokenized already, and its files "
                    "are not texts; give it to `train`, alone"
                )
            others += _read_part(part, unread)
    tell_unread(unread, f"--data={spec}")

    # Split over all files together: each may have too few records, all of them enough.
    others_train, others_heldout = split_by_hash(others)
    records = Records(train + others_train, heldout + others_heldout)
    if not records.train:
        raise UserError(f"--data={spec} holds no records; give text or JSONL files, or {BUILTIN}")
    return records


def _read_part(part: str, unread: collections.Counter[str]) -> list[Record]:
    """Return the records of a file, a folder or a glob; say which of its files are not read."""
    files, texts, left_out = find_files(part), {}, collections.Counter[str]()
    records: list[list[Record]] = []
    has_rows = False
    for path in files.paths:
        try:
            content = read_file(path)
        except UnicodeDecodeError as error:
            if files.is_named:
                raise UserError(f"{path}: not UTF-8 text ({error})") from None
            left_out[ending(path)] += 1  # a picture or an archive in a folder of texts
            continue

        if not isinstance(content, str):
            records.append(list(_parse_rows(content, unread)))
            has_rows = True
        elif content.strip():
            is_json = plain_name(path).endswith(".json")
            if files.is_named and is_json:
                raise UserError(
                    f"{path}: holds no rows; expected a list of objects, or one object a line. To "
                    "learn from its text as it stands, give it another ending, such as .txt"
                )
            if is_about_data(path) or is_json:
                texts[len(records)] = path
            records.append([Text(str(path), content)])

    left_out += files.left_out  # drops what was counted no time
    # Next to rows, or to tables that are not read, a card is not what is to be learned, nor is
    # JSON without rows.
    if not files.is_named and (has_rows or left_out.keys() & NOT_READ):
        for index, path in texts.items():
            records[index] = []
            left_out[ending(path)] += 1
    if left_out:
        listed = ", ".join(f"{name} ({count})" for name, count in left_out.most_common())
        said = f"--data={part}: files that are not read: {listed}"
        if not any(records):
            raise UserError(f"{said}; there are no others")
        say(said)
    return list(itertools.chain.from_iterable(records))


def _parse_rows(rows: Rows, unread: collections.Counter[str]) -> Iterator[Record]:
    """Yield the records of rows: values, or bytes of JSON.

    Raises UserError at the end, naming all rows that cannot be read.
    """
    refused: dict[str, UserError] = {}
    num_failed = 0
    for source, row in rows:
        try:
            value = parse_line(row, source) if isinstance(row, bytes) else row
            records = parse_row(value, source, unread)
            num_failed += not records
            yield from records
        except UserError as error:
            refused[source] = error
    if num_failed:
        say(f"left out {num_failed} rows that `generate` could not decode, the last at {source}")

    if refused:
        first, *others = refused
        more = f"{', '.join(others[:MOST_NAMED])}{', ...' if len(others) > MOST_NAMED else ''}"
        also = f"; {len(others)} more cannot be read: {more}" if others else ""
        raise UserError(f"{refused[first]}{also}")
