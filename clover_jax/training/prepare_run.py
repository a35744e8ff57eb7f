"""One run of `prepare`: read, preview or regenerate, tokenize, cache activations."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clover_jax.checkpoints.loading import describe_base, load_base
from clover_jax.data.chat import Encoded
from clover_jax.data.chat_templates import frozen_clock, template_notice, with_chat_template
from clover_jax.data.forms import content_text, parse_row
from clover_jax.data.prepared import (
    HELDOUT,
    HIDDEN,
    REGENERATED,
    TRAIN,
    ShardWriter,
    in_shards,
    pack,
)
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import Conversation, Message, Record, Text, TokenRow, data_hash
from clover_jax.data.samples import Reading, RecordSamples, SampleCounts, look_at
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import Records, read_records, sample_identity
from clover_jax.decoding.generate_run import decode_with_bar, memory_advice, open_rows, wants_color
from clover_jax.decoding.models import identity_of, load
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_stream import RowTotals, open_stream
from clover_jax.errors import UserError
from clover_jax.models.meshes import mesh_for
from clover_jax.models.placement import place_on
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.device_memory import advise_on_memory
from clover_jax.runtime.distributed import from_primary, is_primary, process_count
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.files import only_process_in
from clover_jax.runtime.jsonl import read_rows
from clover_jax.runtime.progress import passing_note, progress_bar, say
from clover_jax.runtime.row_writer import manifest_path
from clover_jax.training.features import feature_names, write_features
from clover_jax.training.settings import PrepareOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 32 << 20  # what a killed run loses at most

_COUNTED, _REST, _RESET = "\033[32m", "\033[2m", "\033[0m"
# Without colors; chat templates do not have these.
_OPEN, _CLOSE = "⟦", "⟧"


def run_prepare(options: PrepareOptions) -> dict[str, Any]:
    """Do what is asked for, or what an earlier run has left of it; return the report."""
    begun: tuple[Path, ...] = ()
    if not options.preview and not options.overwrite:
        regenerated = manifest_path(options.directory / REGENERATED)
        begun = (regenerated, options.directory / HELDOUT)
    with frozen_clock(*begun):
        return _run(options)


def _run(options: PrepareOptions) -> dict[str, Any]:
    if process_count() > 1 and not options.runs_base:
        raise UserError(
            f"{process_count()} processes run a base for --regenerate or --features; without "
            "these run one process"
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
        samples = RecordSamples(records.train, reading)
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
    """Write both splits, or what is missing of them; return their figures for the report."""
    if options.regenerate:
        records = records._replace(train=read_answered(options.directory))
    # A look at some finds out in a second what reading all would find out in the end.
    samples = RecordSamples(records.train, reading)
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
        "data_hash": identity.pop("data"),
        **identity,
        "vocab_size": reading.vocab_size,
        "seq_len": reading.seq_len,
    }

    # The writer knows which samples an earlier run has written.
    writer = ShardWriter(options.directory, manifest, made_from)
    samples = RecordSamples(records, reading)
    if not writer.is_complete:
        total, done = len(samples), writer.num_records
        with progress_bar(total, manifest.removesuffix(".json"), "sample", initial=done) as bar:
            # Each shard keeps its own counts, so that a resumed run need not count it again.
            of_shard = SampleCounts()

            def make_records() -> Iterator[bytes]:
                for index in range(done, total):
                    sample = of_shard.add(samples, index)
                    bar.update()
                    yield pack(sample._asdict())

            for shard in in_shards(make_records(), SHARD_BYTES):
                writer.write(shard, counts=of_shard.to_dict())
                of_shard = SampleCounts()

    counts = SampleCounts.total(shard["counts"] for shard in writer.shards)
    # Held-out samples are measured with, so nothing need be learned from them.
    if manifest == TRAIN:
        counts.judge(samples, options.max_truncated)
    return writer.finish(counts=counts.to_dict())


def show_samples(
    samples: RecordSamples, count: int, tokenizer: PreTrainedTokenizerBase | None, file: TextIO
) -> None:
    """Write some samples, spread evenly: what counts in green, or in brackets on no terminal."""
    in_color = wants_color(file)
    marks = "in green" if in_color else f"between {_OPEN} and {_CLOSE}"
    # Rounded up, so that no more are shown than were asked for.
    for index in range(0, len(samples), max(1, -(-len(samples) // count))):
        sample = samples[index]
        source, size = samples.sections[index].source, len(sample.tokens)
        file.write(f"== {source}: {size} tokens, {sample.loss_mask.sum()} to learn, {marks}\n")
        file.write(f"{marked_text(sample, tokenizer, in_color)}\n")
    file.flush()


def marked_text(sample: Encoded, tokenizer: PreTrainedTokenizerBase | None, in_color: bool) -> str:
    """Return a sample's text, special tokens included, with what counts marked."""
    # Each run of tokens with the same mask is decoded as one part.
    parts, end = [], 0
    for counts, run in itertools.groupby(sample.loss_mask.tolist()):
        start, end = end, end + len(list(run))
        if tokenizer is None:
            text = "".join(f"{token} " for token in sample.tokens[start:end])
        else:
            # Decoders look at neighbors, so a part is what it adds to the whole.
            before, whole = (
                str(tokenizer.decode(sample.tokens[:stop].tolist())) for stop in (start, end)
            )
            text = whole[len(before) :]
        if in_color:
            parts.append(f"{_COUNTED if counts else _REST}{text}{_RESET}")
        else:
            parts.append(f"{_OPEN}{text}{_CLOSE}" if counts else text)
    return "".join(parts)


def answer(records: Sequence[Record], options: PrepareOptions) -> dict[str, Any]:
    """Answer the conversations, answer by answer, and return the figures.

    The rows are kept in OUTPUT/regenerated.jsonl, as `generate` writes them, and a stopped run is
    resumed. Several processes do it together, as for `generate`.
    """
    # Before the models: a text among the records is a mistake that needs no base to be found.
    prompts = [_prompt(index, record) for index, record in enumerate(records)]
    with passing_note(f"loading {options.spec.base}"):
        models = load(options.spec)

    # A conversation that outgrows the context is left out, not cut: its answers would be others.
    settings = GenerationSettings(
        **vars(options.warping), max_new_tokens=options.max_new_tokens, context_overflow="skip"
    )

    path = options.directory / REGENERATED
    depends_on = {"run_seed": options.seed, **settings.to_dict(), **identity_of(models)}
    with open_rows(path, prompts, depends_on, options.overwrite) as rows:
        figures, done = RowTotals(rows.kept()), rows.finished
        # Where nothing is left, an engine would be compiled for nothing.
        if done < len(prompts):
            stream = open_stream(
                models,
                prompts,
                settings,
                batch_size=options.batch_size,
                seed=options.seed,
                part=slice(done, None),
            )
            with (
                CompileClock() as clock,
                progress_bar(
                    len(prompts), "regenerate", "row", initial=done, first_compiles=True
                ) as bar,
                memory_advice(options.batch_size),
            ):
                decode_with_bar(stream, rows, figures, bar, clock)
    return figures.to_dict()


def read_answered(directory: Path) -> list[Record]:
    """Return the records with the answers that were kept in a folder."""
    # Rows that failed or were left out have no answer. Row 0 is the file's line 1.
    path = directory / REGENERATED
    answered = (row for row in read_rows(path) if "output_ids" in row)
    records = [
        record for row in answered for record in parse_row(row, f"{path}:{row['index'] + 1}")
    ]
    if not records:
        raise UserError(f"{path}: no row could be decoded; its rows say why")
    return records


def _prompt(index: int, record: Record) -> Prompt:
    """Return what the base is asked: the user's turns, or the ids before the first answer."""
    if isinstance(record, Text):
        raise UserError(
            f"{record.source}: plain text has no answers to regenerate; give conversations, or "
            "leave out --regenerate"
        )
    if isinstance(record, Conversation):
        return _conversation_prompt(index, record)
    # Later turns replied to answers that are replaced now.
    ids = record.prompt_ids if isinstance(record, TokenRow) else record.turns[0][0]
    return Prompt(index, record.source, prompt_ids=ids)


def _conversation_prompt(index: int, record: Conversation) -> Prompt:
    """Return system messages, and what the others say before each answer.

    Messages of one side in a row are one turn; an answer before the first question is left out. An
    answer that a tool replied to stays in its place with the reply, since another call would have
    another one; the base answers after it.
    """
    # The system speaks before the first turn, wherever its message was found.
    system = tuple(message for message in record.messages if message["role"] == "system")
    others = [message for message in record.messages if message["role"] != "system"]
    turns: list[list[Message]] = [[]]
    for message, following in itertools.zip_longest(others, others[1:]):
        is_answer = message["role"] == "assistant"
        if is_answer and (following is None or following["role"] in ("assistant", "user")):
            turns += [[]] if turns[-1] else []
        else:
            turns[-1].append(message)

    said = tuple(map(_turn, filter(None, turns)))
    if not said:
        raise UserError(f"{record.source}: there is no user message to answer")
    return Prompt(
        index, record.source, messages=system or None, turns=said, variables=record.variables
    )


def _turn(messages: list[Message]) -> str | tuple[Message, ...]:
    """Return a turn of the user's text alone as one text, and other messages as they are."""
    if any(message["role"] != "user" for message in messages):
        return tuple(messages)
    return "\n".join(map(content_text, messages))
