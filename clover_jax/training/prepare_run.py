"""One run of `prepare`: read, preview or regenerate, tokenise, cache activations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clover_jax.checkpoints.loading import describe_base, load_base
from clover_jax.data.chat_templates import template_notice, with_chat_template
from clover_jax.data.prepared import HELDOUT, HIDDEN, TRAIN, ShardWriter, in_shards, pack_sample
from clover_jax.data.records import Record, data_hash
from clover_jax.data.samples import RecordSamples, SampleCounts, look_at
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import Records, read_records, sample_identity
from clover_jax.errors import UserError
from clover_jax.models.meshes import mesh_for
from clover_jax.models.placement import place_on
from clover_jax.runtime.device_memory import advise_on_memory
from clover_jax.runtime.distributed import from_primary, is_primary, process_count
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.files import only_process_in
from clover_jax.runtime.progress import passing_note, progress_bar, say
from clover_jax.training.features import feature_names, write_features
from clover_jax.training.prepare_options import PrepareOptions
from clover_jax.training.preview import show_samples
from clover_jax.training.regenerate import answer, read_answered

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


def run_prepare(options: PrepareOptions) -> dict[str, Any]:
    """Do what is asked for, or what an earlier run has left of it; return the report.

    Raises UserError for whatever cannot work.
    """
    if process_count() > 1 and not options.runs_base:
        raise UserError(
            f"{process_count()} processes run a base for --regenerate or --features; without "
            "these prepare in one"
        )
    described = describe_base(options.spec.base)
    config, directory = described.config, described.directory
    # The base cannot read positions beyond its context.
    if options.seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq_len={options.seq_len} is longer than the base's context, "
            f"{config.max_position_embeddings}"
        )

    # All that reads text, before the data, which may be large.
    names = feature_names(options.features, config)
    tokenizer = with_chat_template(load_tokenizer(directory), options.spec.chat_template)
    reading = Reading(tokenizer, config.vocab_size, options.seq_len, config.eos_token_ids)
    with passing_note(f"reading {options.data}"):
        records = read_records(options.data)
    say(template_notice(records.train, tokenizer))

    if options.preview:
        # Shown before they are judged: a user may look to find out why they are refused.
        samples = reading.samples(records.train)
        show_samples(samples, options.preview_samples, tokenizer, sys.stdout)
        counts = look_at(samples)
        counts.judge(samples, options.max_truncated)
        return {"looked_at": counts.to_dict(), "samples": len(samples)}
    options.directory.mkdir(parents=True, exist_ok=True)
    # Of several processes of one run the primary locks and writes.
    alone = only_process_in(options.directory, "is preparing", "--output")
    with alone if is_primary() else contextlib.nullcontext():
        if options.overwrite and is_primary():
            # Manifests first: a shard that no manifest lists is not data.
            for name in (HIDDEN, TRAIN, HELDOUT):
                (options.directory / name).unlink(missing_ok=True)
                for shard in options.directory.glob(f"{Path(name).stem}-*.array_record"):
                    shard.unlink()
        return _prepare(records, reading, names, options)


def _prepare(
    records: Records, reading: Reading, names: tuple[str, ...], options: PrepareOptions
) -> dict[str, Any]:
    report: dict[str, Any] = {"output": str(options.directory)}
    if options.regenerate:
        # Held-out records keep their answers: they are measured with, not trained on.
        report["regenerated"] = answer(records.train, options)
    # Only the primary writes; the others read the shards when they run the base.
    report |= from_primary(lambda: _write_samples(records, reading, options))

    # Only the base: the models that `answer` loaded have been freed.
    if names:
        mesh, dtype = mesh_for(options.spec.mesh), resolve_dtype(options.spec.dtype)
        with passing_note(f"loading {options.spec.base}"):
            base = load_base(options.spec.base, dtype, place_on(mesh, dtype))
        with advise_on_memory(
            f"read {options.batch_size} rows of {options.seq_len} tokens at once",
            "give a smaller --batch_size, or --dtype=bfloat16",
        ):
            size = write_features(base, names, report["tokens"], options, mesh)
        report |= {"features": list(names), "feature_bytes": size}
    return report


def _write_samples(records: Records, reading: Reading, options: PrepareOptions) -> dict[str, Any]:
    """Write both splits, or what is missing of them; return their figures for the report.

    Raises UserError for what is wrong with the samples.
    """
    if options.regenerate:
        records = records._replace(train=read_answered(options.directory))
    # A look at some finds out in a second what reading all would find out in the end.
    samples = reading.samples(records.train)
    look_at(samples).check(samples, options.max_truncated)
    # Training samples last: where their manifest is complete, all is there.
    _write_split(HELDOUT, records.heldout, reading, options)
    manifest = _write_split(TRAIN, records.train, reading, options)
    return {
        **manifest["counts"],
        "heldout": len(records.heldout),
        "bytes": manifest["bytes"],
        "data_hash": manifest["made_from"]["data_hash"],
    }


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
