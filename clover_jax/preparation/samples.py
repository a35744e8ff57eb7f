"""Tokenise records into the shards of a prepared folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.data.prepared import HELDOUT, TRAIN, pack_sample
from clover_jax.data.readers import Records
from clover_jax.data.records import Record, data_hash
from clover_jax.data.sample_checks import SampleCounts
from clover_jax.data.samples import RecordSamples
from clover_jax.data.shards import ShardWriter, in_shards
from clover_jax.data.training_data import sample_identity
from clover_jax.preparation.options import PrepareOptions
from clover_jax.runtime.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 32 << 20  # what a killed run loses at most


class Reading(NamedTuple):
    """How records become samples: by a base's tokenizer, None where it has none, for its V.

    seq_len: tokens of a row. eos_token_ids: the base's.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    seq_len: int
    eos_token_ids: tuple[int, ...]

    def samples(self, records: Sequence[Record]) -> RecordSamples:
        """Return the samples of records."""
        return RecordSamples(records, *self)


def write_samples(records: Records, reading: Reading, options: PrepareOptions) -> dict[str, Any]:
    """Write both splits, or what is missing of them; return the training split's manifest.

    Raises UserError for what is wrong with the samples.
    """
    # Training samples last: where their manifest is complete, all is there.
    _write_split(HELDOUT, records.heldout, reading, options)
    return _write_split(TRAIN, records.train, reading, options)


def _write_split(
    manifest: str, records: Sequence[Record], reading: Reading, options: PrepareOptions
) -> dict[str, Any]:
    # All that a shard depends on: where any of it differs, the folder is refused.
    identity = sample_identity(data_hash(records), reading.tokenizer)
    made_from = {
        "data_hash": identity["data"],
        "tokenizer": identity["tokenizer"],
        "chat_template": identity["chat_template"],
        "vocab_size": reading.vocab_size,
        "seq_len": reading.seq_len,
    }

    # The writer knows which samples an earlier run has written.
    writer = ShardWriter(options.directory, manifest, made_from)
    samples = reading.samples(records)
    if not writer.is_complete:
        total, done = len(samples), writer.num_records
        with progress_bar(total, manifest.removesuffix(".json"), "sample", initial=done) as bar:
            # Each shard keeps its own counts, so that a resumed run need not count it again.
            of_shard = SampleCounts()

            def make_records() -> Iterator[bytes]:
                for index in range(done, total):
                    sample = of_shard.add(samples, index)
                    bar.update()
                    yield pack_sample(sample)

            for shard in in_shards(make_records(), SHARD_BYTES):
                writer.write(shard, counts=of_shard.to_dict())
                of_shard = SampleCounts()

    counts = SampleCounts.total(shard["counts"] for shard in writer.shards)
    # Held-out samples are measured with, so nothing need be learnt from them.
    if manifest == TRAIN:
        counts.judge(samples, options.max_truncated)
    return writer.finish(counts=counts.to_dict())
