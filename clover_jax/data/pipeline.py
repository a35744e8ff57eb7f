"""The grain pipeline: samples -> shuffled -> cut -> packed -> batches, for ever.

Deterministic in (samples, settings, seed); its iterator's state is small JSON and exact, so that a
resumed run sees the very batches that an uninterrupted one would have seen.

Tokens are packed in every process alike. Activations, thousands of times as large, are read
afterwards, by the processes whose rows need them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np
from grain.experimental import (
    FirstFitPackIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
    ThreadPrefetchIterDataset,
)

from clover_jax.data.samples import Samples, learnable_pieces
from clover_jax.models.batch import Batch

# Rows that are packed together: more leave less padding.
BATCHES_PER_PACK = 4
PREFETCHED_BATCHES = 2
ORIGIN = ("sample", "place")  # of every token: the number of its sample, its place in it


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Batches of `batch_size` rows of `seq_len` positions, shuffled by `seed`."""

    batch_size: int
    seq_len: int
    seed: int = 0

    def __post_init__(self):
        if self.batch_size < 1 or self.seq_len < 2:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be at least 1 and seq_len "
                f"({self.seq_len}) at least 2"
            )


def make_pipeline(
    samples: Samples, config: PipelineConfig, hidden_rows: Iterable[int] | None = None
) -> grain.IterDataset[Batch]:
    """Return the endless dataset of batches; `iter` of it gives a checkpointable iterator.

    hidden_rows: rows that this process needs activations of, the others' are zero; None for all.
    """
    dataset = (
        grain.MapDataset.source(_Numbered(samples))
        .seed(config.seed)
        .shuffle()
        .repeat()
        # Tokenizing is far faster than training: one thread ahead is plenty.
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
    )
    # Cut before packing: a row has room for a piece of any sample.
    dataset = FlatMapIterDataset(dataset, CutInPieces(config.seq_len))
    # First-fit packing into the rows of several batches; each piece is a segment of its own.
    dataset = FirstFitPackIterDataset(
        dataset,
        length_struct=dict.fromkeys(("tokens", "loss_mask", *ORIGIN), config.seq_len),
        # These lie where the tokens lie: their segments need no arrays of their own.
        meta_features=ORIGIN,
        num_packing_bins=BATCHES_PER_PACK * config.batch_size,
        seed=config.seed,
    )

    dataset = dataset.batch(config.batch_size, drop_remainder=True)
    # Last, since activations are large and most rows may be other processes'.
    rows = range(config.batch_size) if hidden_rows is None else tuple(hidden_rows)
    dataset = dataset.map(functools.partial(as_batch, samples=samples, hidden_rows=rows))
    # The next batches are made while the device computes.
    return ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=PREFETCHED_BATCHES)


class _Numbered:
    """Samples as arrays by name, every token with the place that it comes from."""

    def __init__(self, samples: Samples):
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, loss_mask = self._samples[index]
        return {
            "tokens": tokens,
            "loss_mask": loss_mask,
            # Packed rows mix samples; these two say where a token's activations are stored.
            "sample": np.full(len(tokens), index, np.int64),
            "place": np.arange(len(tokens), dtype=np.int32),
        }


class CutInPieces(FlatMapTransform):
    """Cut a sample into pieces of at most `seq_len` tokens that have something to train on."""

    def __init__(self, seq_len: int):
        self.seq_len = seq_len

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the pieces of a sample's arrays with at least one pair that counts."""
        pieces = learnable_pieces(element["loss_mask"], self.seq_len)
        return [{name: array[piece] for name, array in element.items()} for piece in pieces]


def as_batch(packed: dict[str, Any], samples: Samples, hidden_rows: Iterable[int]) -> Batch:
    """Name the packer's arrays as a Batch, and read the activations of some rows."""
    return Batch(
        tokens=packed["tokens"],
        # 0 is padding; pieces count from 1 in their row.
        segment_ids=packed["tokens_segment_ids"],
        positions=packed["tokens_positions"],
        loss_mask=packed["loss_mask"].astype(bool),
        hidden=_read_hidden(packed, samples, hidden_rows) if samples.hidden_names else None,
    )


def _read_hidden(
    packed: dict[str, np.ndarray], samples: Samples, rows: Iterable[int]
) -> dict[str, Any]:
    number, place, segment = packed["sample"], packed["place"], packed["tokens_segment_ids"]
    # Untouched zeros take no memory. (Empty slots say sample 0, which is always there.)
    hidden = {
        name: np.zeros((*number.shape, *array.shape[1:]), array.dtype)
        for name, array in samples.hidden(int(number[0, 0])).items()
    }

    # Segment by segment: each is a piece of one sample.
    for row in rows:
        for one in range(1, segment[row].max() + 1):
            slots = np.flatnonzero(segment[row] == one)
            for name, array in samples.hidden(int(number[row, slots[0]])).items():
                hidden[name][row, slots] = array[place[row, slots]]
    return hidden
