"""Tokenise records into the shards of a prepared folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.data.prepared import HELDOUT, TRAIN, pack_sample
from clover_jax.data.readers import Records
from clover_jax.data.records import data_hash
from clover_jax.data.sample_checks import SampleCounts
from clover_jax.data.samples import RecordSamples
from clover_jax.data.shards import ShardWriter, in_shards
from clover_jax.data.training_data import template_hash
from clover_jax.preparation.options import PrepareOptions
from clover_jax.runtime.progress import Progress, progress_bar
from clover_jax.tokenizers.tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 32 << 20  # what a killed run loses at most


class Reading(NamedTuple):
    """How a base reads text: its tokenizer, None where it has none, and V."""

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int


def write_samples(records: Records, reading: Reading, options: PrepareOptions) -> dict[str, Any]:
    """Write both splits, or what is missing of them; return the training split's manifest.

    Raises UserError for what is wrong with the samples.
    """
    # Training samples last: where their manifest is complete, all is there.
    _write_split(HELDOUT, records.heldout, reading, options)
    return _write_split(TRAIN, records.train, reading, options)


def _write_split(
    manifest: str, records: list, reading: Reading, options: PrepareOptions
) -> dict[str, Any]:
    made_from = {
        "data_hash": data_hash(records),
        "tokenizer": tokenizer_hash(reading.tokenizer) if reading.tokenizer else None,
        "chat_template": template_hash(reading.tokenizer),
        "vocab_size": reading.vocab_size,
        "seq_len": options.seq_len,
    }
    writer = ShardWriter(options.output, manifest, made_from)
    samples = RecordSamples(records, *reading, options.seq_len)
    if not writer.is_complete:
        total, done = len(samples), writer.num_records
        with progress_bar(total, manifest.removesuffix(".json"), "sample", initial=done) as bar:
            tally = _Tally(samples, options.seq_len, bar)
            for shard in in_shards(tally.records(done), SHARD_BYTES):
                writer.write(shard, counts=tally.take())
    counts = add_counts(shard["counts"] for shard in writer.shards)
    if manifest == TRAIN:
        counts.check(options.seq_len, options.max_truncated)
    return writer.finish(counts=counts.to_dict())


class _Tally:
    """Tokenises samples and counts them, shard by shard."""

    def __init__(self, samples: RecordSamples, seq_len: int, bar: Progress):
        self._samples, self._seq_len, self._bar = samples, seq_len, bar
        self._counts = SampleCounts()

    def records(self, first: int) -> Iterator[bytes]:
        """Yield the records from sample `first` on."""
        for index in range(first, len(self._samples)):
            sample = self._samples[index]
            self._counts.add(self._samples.sections[index], sample, self._seq_len)
            self._bar.update()
            yield pack_sample(sample)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, SampleCounts()
        return counts.to_dict()


def add_counts(counts: Iterator[Mapping[str, int]]) -> SampleCounts:
    """Return the counts of several shards as one."""
    total = SampleCounts()
    for part in counts:
        # Shards of earlier versions have no pieces: where tokens count, take it that some do.
        for name, value in ({"pieces": part["counted"]} | part).items():
            before = getattr(total, name)
            setattr(total, name, max(before, value) if name == "longest" else before + value)
    return total
