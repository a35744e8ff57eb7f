"""The data that --data names, ready to train on: raw files, or a folder that `prepare` made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clover_jax.data.prepared import PreparedSamples, heldout_rows, is_prepared
from clover_jax.data.readers import read_records
from clover_jax.data.records import Record, data_hash
from clover_jax.data.rows import json_hash
from clover_jax.data.samples import RecordSamples, Samples, look_at
from clover_jax.data.tokenizer import template_hash, tokenizer_hash
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingData(NamedTuple):
    """Data of a run.

    samples: to train on.
    heldout: records that are never trained on.
    identity: the hashes that the samples depend on, the same for raw and for prepared data: "data"
        (the records), "tokenizer" and "chat_template" (None where there is none), and
        "activations" of a cached teacher. A run that goes on must find them unchanged.
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
    eos_token_ids: the base's tokens at the end of an answer.
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
