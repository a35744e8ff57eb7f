"""Run the base over prepared samples and keep the activations that a head is trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Array, Params
from clover_jax.checkpoints.base import BaseModel, fingerprint
from clover_jax.config import BaseConfig
from clover_jax.data.prepared import HIDDEN, PreparedSamples, ShardWriter, in_shards, pack
from clover_jax.decoding.programs import Placement
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.models.placement import row_shardings
from clover_jax.runtime.distributed import from_primary
from clover_jax.runtime.progress import progress_bar, say
from clover_jax.training.settings import PrepareOptions
from clover_jax.training.teacher import read_base, stored_names

# Activations are thousands of times as large as tokens: a smaller shard would have few samples.
SHARD_BYTES = 256 << 20
ASK_FROM = 10e9  # bytes


# From tokens, segment ids and positions, [B, S] each, to name -> [B, S, D].
Read = Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, Array]]


class Rows(NamedTuple):
    """Tokens for one forward, [B, S] each, and the places of their pieces, in order."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    places: list[Place]


class Place(NamedTuple):
    """Columns of a row that hold a piece of a sample; is_last: the sample ends with it."""

    row: int
    columns: slice
    is_last: bool


def feature_names(spec: str, base: BaseConfig) -> tuple[str, ...]:
    """Return the activations to keep: --features names them or a drafter that reads them."""
    if spec == "none":
        return ()
    # A drafter's name stands for the activations that it is trained on.
    if spec in registry.DRAFTERS:
        return stored_names(registry.config_for_base(spec, base).features)

    known = {"pre_norm", "post_norm", *(f"layer_{index}" for index in range(base.num_layers))}
    names = {name.strip() for name in spec.split(",")}
    unknown = sorted(names - known)
    if unknown:
        raise UserError(
            f"--features={spec}: {unknown[0]!r} is neither a drafter "
            f"({', '.join(registry.DRAFTERS)}) nor one of pre_norm, post_norm, layer_0 to "
            f"layer_{base.num_layers - 1}"
        )
    # With g for the loss, and all that was named: a head that reads g alone needs g as well as h.
    # Sorted, so that a list in another order is the same data.
    return tuple(sorted({*names, *stored_names(tuple(names))}))


def write_features(
    base: BaseModel,
    names: tuple[str, ...],
    num_tokens: int,
    options: PrepareOptions,
    mesh: Mesh | None,
) -> int:
    """Write the named activations of every training sample, or what is missing; return their bytes.

    mesh: that the base's params are split over; rows are split with them. Several processes read
        the samples, and run the base, together; the primary writes.
    Raises UserError where the disk is too small, or large files were not agreed to.
    """
    # Samples first, then activations: the manifest names the data that they belong to.
    samples = PreparedSamples(options.directory)
    made_from = {
        "base": fingerprint(base).to_dict(),
        "data_hash": samples.made_from["data_hash"],
        "seq_len": options.seq_len,
        "names": list(names),
        "dtype": options.feature_dtype,
        "base_dtype": str(base.dtype),
    }
    # The primary alone will have one.
    writers: list[ShardWriter] = []

    def begin() -> int:
        """Open the shards and return how many samples are done."""
        writers.append(ShardWriter(options.directory, HIDDEN, made_from))
        # Tokens, and so bytes, are known before the first forward.
        width = len(names) * base.config.hidden_size * jnp.dtype(options.feature_dtype).itemsize
        there = sum(shard["bytes"] for shard in writers[0].shards)
        if not writers[0].is_complete:
            _agree_to_size(num_tokens * width, there, options)
        return writers[0].num_records

    done = from_primary(begin)
    if done < len(samples):
        read = reader(base, names, options.feature_dtype, mesh)
        # Every device reads the same number of rows.
        batch_size = Placement(mesh).whole_rows(options.batch_size)
        with progress_bar(len(samples), "features", "sample", initial=done) as bar:
            batches = _pack_rows(samples, done, batch_size, options.seq_len)
            for shard in in_shards(make_records(batches, read, bar.update), SHARD_BYTES):
                # All processes come here, as they run the base together; one of them has a writer.
                for writer in writers:
                    writer.write(shard)
    # Every process reports the primary's number.
    return from_primary(lambda: writers[0].finish()["bytes"])


def reader(base: BaseModel, names: tuple[str, ...], dtype: str, mesh: Mesh | None) -> Read:
    """Return the compiled forward; on a mesh each device reads some rows, and has all results."""
    placement = Placement(mesh)

    def read_rows(params: Params, *rows: Array) -> dict[str, Array]:
        if mesh is not None:
            rows = jax.lax.with_sharding_constraint(rows, row_shardings(rows, mesh))
        # Cast on the device, so that fewer bytes come to the host.
        hidden = read_base(base.config, params, *rows, mesh=mesh)
        return placement.whole({name: hidden[name].astype(dtype) for name in names})

    compiled = jax.jit(read_rows)

    def read(*rows: np.ndarray) -> dict[str, Array]:
        with placement.in_use():
            return compiled(base.params, *rows)

    return read


def _agree_to_size(needed: int, there: int, options: PrepareOptions) -> None:
    # Shards of an earlier run take no more room than they do.
    free = shutil.disk_usage(options.directory).free
    where = f"in {options.directory}, {free / 1e9:.1f} GB are free"
    sizes = f"{needed / 1e9:.1f} GB for activations {where}"
    say(sizes)
    if needed - there > free:
        raise UserError(f"the disk is too small: {sizes}; give an --output elsewhere, or less data")
    if needed > ASK_FROM and not options.yes:
        raise UserError(f"this takes {sizes}; add --yes to agree")


def make_records(batches: Iterator[Rows], read: Read, count: Callable[[], None]) -> Iterator[bytes]:
    """Yield the records of the samples in the batches, in order, and count each."""
    parts: list[dict[str, np.ndarray]] = []
    for rows, hidden in _read_ahead(batches, read):
        # A sample longer than a row is in several pieces, which follow one another.
        for place in rows.places:
            parts.append({name: array[place.row, place.columns] for name, array in hidden.items()})
            if place.is_last:
                count()  # here and not by the shard, which takes minutes
                whole = {name: np.concatenate([part[name] for part in parts]) for name in hidden}
                yield pack(whole)
                parts = []


def _pack_rows(
    samples: PreparedSamples, first: int, batch_size: int, seq_len: int
) -> Iterator[Rows]:
    """Pack the samples from `first` on, in the pieces that training cuts them into."""
    rows, row, column = _empty_rows(batch_size, seq_len), 0, 0
    for index in range(first, len(samples)):
        tokens = samples[index].tokens
        # A sample without tokens has a place, too: its record must not be missing.
        for start in range(0, max(len(tokens), 1), seq_len):
            piece = tokens[start : start + seq_len]
            # No room in this row: begin the next row, after the last row the next batch.
            if column + len(piece) > seq_len:
                row, column = row + 1, 0
            if row == batch_size:
                yield rows
                rows, row = _empty_rows(batch_size, seq_len), 0

            # A segment of its own: as in training, a piece sees none before it, even of its sample.
            columns = slice(column, column + len(piece))
            rows.places.append(Place(row, columns, is_last=start + seq_len >= len(tokens)))
            rows.tokens[row, columns] = piece
            rows.segment_ids[row, columns] = len(rows.places)
            rows.positions[row, columns] = np.arange(len(piece))
            column = columns.stop
    yield rows


def _empty_rows(batch_size: int, seq_len: int) -> Rows:
    tokens, segment_ids, positions = (np.zeros((batch_size, seq_len), np.int32) for _ in range(3))
    return Rows(tokens, segment_ids, positions, places=[])


def _read_ahead(
    batches: Iterator[Rows], read: Read
) -> Iterator[tuple[Rows, dict[str, np.ndarray]]]:
    """Yield rows and their activations on the host; the next forward runs meanwhile."""
    before: tuple[Rows, dict[str, Array]] | None = None
    for rows in batches:
        hidden = read(rows.tokens, rows.segment_ids, rows.positions)
        # The forward above has only been started: the host reads the one before meanwhile.
        if before is not None:
            yield before[0], jax.device_get(before[1])
        before = rows, hidden
    if before is not None:
        yield before[0], jax.device_get(before[1])
