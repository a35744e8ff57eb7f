"""The grain pipeline: samples -> shuffled -> cut -> packed -> batches, for ever.

Deterministic in (samples, settings, seed); its iterator's state is small JSON and exact, so that a
resumed run sees the very batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import grain
import numpy as np
from grain.experimental import (
    FirstFitPackIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
    ThreadPrefetchIterDataset,
)

from clover_jax.data.batch import Batch
from clover_jax.data.chat import Encoded
from clover_jax.data.samples import Samples

# Rows that are packed together: more leave less padding.
BATCHES_PER_PACK = 4
PREFETCHED_BATCHES = 2


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


def make_pipeline(samples: Samples, config: PipelineConfig) -> grain.IterDataset[Batch]:
    """Return the endless dataset of batches; `iter` of it gives a checkpointable iterator."""
    dataset = (
        grain.MapDataset.source(samples)
        .seed(config.seed)
        .shuffle()
        .repeat()
        # Tokenising is far faster than training: one thread ahead is plenty. Activations are large.
        .to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=8 if samples.hidden_names else 64)
        )
    )
    dataset = FlatMapIterDataset(dataset, CutInPieces(config.seq_len))
    lengths = {"tokens": config.seq_len, "loss_mask": config.seq_len}
    dataset = FirstFitPackIterDataset(
        dataset,
        length_struct=lengths | dict.fromkeys(samples.hidden_names, config.seq_len),
        # These lie where the tokens lie: their segments need no arrays of their own.
        meta_features=samples.hidden_names,
        num_packing_bins=BATCHES_PER_PACK * config.batch_size,
        seed=config.seed,
    )
    dataset = dataset.batch(config.batch_size, drop_remainder=True)
    dataset = dataset.map(functools.partial(as_batch, hidden_names=samples.hidden_names))
    return ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=PREFETCHED_BATCHES)


class CutInPieces(FlatMapTransform):
    """Cut a record into pieces of at most `seq_len` tokens that have something to train on."""

    def __init__(self, seq_len: int):
        """Take the longest piece's length."""
        self.seq_len = seq_len

    def flat_map(self, element: Encoded) -> list[dict[str, np.ndarray]]:
        """Return the pieces with at least one pair that counts.

        Example: 5 tokens with seq_len 2 give pieces of 2 and 2; the last token alone has no pair.
        """
        pieces = []
        for start in range(0, len(element.tokens), self.seq_len):
            end = start + self.seq_len
            # The mask of a piece's last token never counts: its target lies beyond.
            if element.loss_mask[start : min(end, len(element.tokens)) - 1].any():
                whole = {"tokens": element.tokens, "loss_mask": element.loss_mask}
                whole |= element.hidden or {}
                pieces.append({name: array[start:end] for name, array in whole.items()})
        return pieces


def as_batch(packed: dict[str, Any], hidden_names: tuple[str, ...] = ()) -> Batch:
    """Name the packer's arrays as a Batch."""
    return Batch(
        tokens=packed["tokens"],
        segment_ids=packed["tokens_segment_ids"],
        positions=packed["tokens_positions"],
        loss_mask=packed["loss_mask"].astype(bool),
        hidden={name: packed[name] for name in hidden_names} or None,
    )
