"""Plain-text pretraining batches: a shuffled stream of documents cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clover_jax.errors import UserError
from experiments.tiny_base.settings import BLOCK


class Windows(NamedTuple):
    """One batch of next-token prediction; every input row starts with the BOS token.

    inputs: [B, S] int32 token ids.
    targets: [B, S] int32, targets[b, s] follows inputs[b, s].
    segment_ids: [B, S] int32, 1, 2, .. numbers the documents within a row.
    weights: [B, S] float32, 0 where the target is a BOS token (nothing predicts a new document).
    """

    inputs: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    weights: np.ndarray


class TokenStream:
    """Documents as token ids, served as the batch of any training step.

    Each epoch shuffles the documents, joins them, cuts the stream into blocks at a new offset and
    shuffles the blocks. The batch of a step depends on (documents, seed, step) alone, so a run
    resumes from its step number. A block cut into shorter windows holds the same tokens.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], *, bos: int, eos: int, blocks: int, seed: int
    ):
        """Take [n] token ids per document, without special tokens; `blocks` are read per step."""
        self.bos, self.seed, self.blocks = bos, seed, blocks
        self._documents = [
            np.concatenate([[bos], tokens, [eos]]).astype(np.int32) for tokens in documents
        ]
        self.num_tokens = sum(len(d) for d in self._documents)
        # A block is lost to the offset, another to the ragged end.
        self.steps_per_epoch = (self.num_tokens // BLOCK - 1) // blocks
        if self.steps_per_epoch < 1:
            raise UserError(
                f"the documents hold {self.num_tokens} tokens; one step of {blocks} blocks of "
                f"{BLOCK} needs at least {(blocks + 1) * BLOCK}"
            )
        self._epoch = -1
        self._rows = np.zeros((0, BLOCK), np.int32)

    def batch(self, step: int, length: int) -> Windows:
        """Return the windows of a step; `length` must divide the block size."""
        if BLOCK % length:
            raise ValueError(f"window length ({length}) must divide {BLOCK}")
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._cut(epoch)
        rows = self._rows[index * self.blocks : (index + 1) * self.blocks]
        return cut_windows(rows.reshape(-1, length), self.bos)

    def _cut(self, epoch: int) -> np.ndarray:
        """Return the epoch's blocks in order: [steps_per_epoch * blocks, BLOCK]."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self._documents))
        stream = np.concatenate([self._documents[i] for i in order])
        offset = int(rng.integers(BLOCK))
        count = self.steps_per_epoch * self.blocks
        cut = stream[offset : offset + (len(stream) - offset) // BLOCK * BLOCK]
        rows = cut.reshape(-1, BLOCK)
        return rows[rng.permutation(len(rows))[:count]]


def cut_windows(targets: np.ndarray, bos: int) -> Windows:
    """Return the windows that predict [B, S] targets, each from a BOS token and what precedes.

    Example: targets [[5, 0, 7]] with bos 0 give inputs [[0, 5, 0]], segment_ids [[1, 1, 2]] and
    weights [[1, 0, 1]].
    """
    first = np.full((len(targets), 1), bos, np.int32)
    inputs = np.concatenate([first, targets[:, :-1]], axis=1).astype(np.int32)
    return Windows(
        inputs=inputs,
        targets=targets.astype(np.int32),
        segment_ids=np.cumsum(inputs == bos, axis=1, dtype=np.int32),
        weights=(targets != bos).astype(np.float32),
    )
