"""Run the base over prepared samples and keep the activations that a head is trained on."""

from __future__ import annotations

import collections
import dataclasses
import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig
from clover_jax.data.prepared import HIDDEN, PreparedSamples
from clover_jax.data.shards import ShardWriter, in_shards, pack
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.preparation.options import PrepareOptions
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.fingerprint import fingerprint
from clover_jax.runtime.progress import progress_bar
from clover_jax.training.teacher import read_base, stored_names

SHARD_BYTES = 256 << 20
ASK_FROM = 10e9  # bytes


class Rows(NamedTuple):
    """Tokens for one forward, [B, S] each, and where every piece came from."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    places: list[Place]


class Place(NamedTuple):
    """Positions column .. column + size - 1 of a row are those from `start` of a sample."""

    row: int
    column: int
    sample: int
    start: int
    size: int


def feature_names(spec: str, base: BaseConfig) -> tuple[str, ...]:
    """Return the activations to keep: --features names them or a drafter that reads them.

    Raises UserError for a name that is neither.
    """
    if spec == "none":
        return ()
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
    return stored_names(tuple(names))


def write_features(
    base: BaseModel, names: tuple[str, ...], num_tokens: int, options: PrepareOptions
) -> dict[str, Any]:
    """Write the named activations of every training sample, or what is missing; return a manifest.

    Raises UserError where the disk is too small, or large files were not agreed to.
    """
    samples = PreparedSamples(options.output)
    made_from = {
        "base": fingerprint(base).to_dict(),
        "data_hash": samples.made_from["data_hash"],
        "seq_len": options.seq_len,
        "names": list(names),
        "dtype": options.feature_dtype,
        "base_dtype": str(base.lm_head.dtype),
    }
    writer = ShardWriter(options.output, HIDDEN, made_from)
    if not writer.is_complete:
        width = len(names) * base.config.hidden_size * jnp.dtype(options.feature_dtype).itemsize
        there = sum(shard["bytes"] for shard in writer.shards)
        _agree_to_size(num_tokens * width, there, options)
        read = functools.partial(_read_rows, base.config, names, options.feature_dtype)
        maker = RecordMaker(samples, options.batch_size, options.seq_len)
        done = writer.num_records
        with progress_bar(len(samples), "features", "sample", initial=done) as bar:
            records = maker.records(done, functools.partial(jax.jit(read), base.params))
            for shard in in_shards(_counted(records, bar.update), SHARD_BYTES):
                writer.write(shard)
    return writer.finish()


def _counted(records: Iterator[bytes], count: Callable[[], None]) -> Iterator[bytes]:
    for record in records:
        count()
        yield record


def _agree_to_size(needed: int, there: int, options: PrepareOptions) -> None:
    free = shutil.disk_usage(options.output).free
    say = f"{needed / 1e9:.1f} GB for activations in {options.output}, {free / 1e9:.1f} GB are free"
    print(say, file=sys.stderr, flush=True)
    if needed - there > free:
        raise UserError(f"the disk is too small: {say}; give an --output elsewhere, or less data")
    if needed > ASK_FROM and not options.yes:
        raise UserError(f"this takes {say}; add --yes to agree")


def _read_rows(
    base: BaseConfig,
    names: tuple[str, ...],
    dtype: str,
    params: Params,
    tokens: Array,
    segment_ids: Array,
    positions: Array,
) -> dict[str, Array]:
    """Return name -> [B, S, D]."""
    hidden = read_base(base, params, tokens, segment_ids, positions)
    return {name: hidden[name].astype(dtype) for name in names}


@dataclasses.dataclass
class RecordMaker:
    """Packs samples into rows, reads the rows, and puts each sample's activations together."""

    samples: PreparedSamples
    batch_size: int
    seq_len: int

    def records(
        self, first: int, read: Callable[[Array, Array, Array], dict[str, Array]]
    ) -> Iterator[bytes]:
        """Yield the records of the samples from `first` on, in order."""
        waiting: collections.deque[tuple[Rows, dict[str, Array]]] = collections.deque()
        self._unfinished: collections.deque[_Unfinished] = collections.deque()
        for rows in self._rows(first):
            waiting.append((rows, read(rows.tokens, rows.segment_ids, rows.positions)))
            # One forward stays on its way while the host takes in the one before.
            if len(waiting) > 1:
                yield from self._take(*waiting.popleft())
        while waiting:
            yield from self._take(*waiting.popleft())

    def _rows(self, first: int) -> Iterator[Rows]:
        """Pack pieces of at most `seq_len` tokens, the pieces that training cuts too."""
        rows, row, column, segment = self._empty_rows(), 0, 0, 0
        for index in range(first, len(self.samples)):
            tokens = self.samples[index].tokens
            self._unfinished.append(_Unfinished(index, len(tokens)))
            for start in range(0, len(tokens), self.seq_len):
                piece = tokens[start : start + self.seq_len]
                if column + len(piece) > self.seq_len:
                    row, column, segment = row + 1, 0, 0
                if row == self.batch_size:
                    yield rows
                    rows, row = self._empty_rows(), 0
                segment += 1
                end = column + len(piece)
                rows.tokens[row, column:end] = piece
                rows.segment_ids[row, column:end] = segment
                rows.positions[row, column:end] = np.arange(len(piece))
                rows.places.append(Place(row, column, index, start, len(piece)))
                column = end
        yield rows

    def _empty_rows(self) -> Rows:
        shape = (self.batch_size, self.seq_len)
        return Rows(*(np.zeros(shape, np.int32) for _ in range(3)), [])

    def _take(self, rows: Rows, hidden: dict[str, Array]) -> Iterator[bytes]:
        """Hand out what was read to its samples, and yield those that are whole now."""
        on_host = jax.device_get(hidden)
        by_index = {sample.index: sample for sample in self._unfinished}
        for place in rows.places:
            columns = slice(place.column, place.column + place.size)
            part = {name: array[place.row, columns] for name, array in on_host.items()}
            by_index[place.sample].add(part, place.size)
        while self._unfinished and not self._unfinished[0].num_missing:
            yield self._unfinished.popleft().record(on_host)


class _Unfinished:
    """A sample whose activations are not all there."""

    def __init__(self, index: int, size: int):
        self.index, self.num_missing = index, size
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, part: dict[str, np.ndarray], size: int) -> None:
        self._parts.append(part)
        self.num_missing -= size

    def record(self, like: dict[str, np.ndarray]) -> bytes:
        empty = {name: array[0, :0] for name, array in like.items()}
        parts = self._parts or [empty]
        return pack({name: np.concatenate([part[name] for part in parts]) for name in empty})
