"""How well a base predicts held-out documents, in a unit that no tokenizer changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.models.decoder import Decoder
from experiments.tiny_base.pretraining import token_loss
from experiments.tiny_base.token_windows import Windows, cut_windows


class HeldoutScore(NamedTuple):
    """Totals over held-out documents: nats of all their tokens, tokens, UTF-8 bytes."""

    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / bytes."""
        return self.nats / math.log(2) / self.bytes

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy."""
        return self.nats / self.tokens


def score_documents(
    base: BaseConfig,
    params: Params,
    documents: Sequence[np.ndarray],
    num_bytes: int,
    *,
    bos: int,
    length: int,
    batch_size: int = 2,
) -> HeldoutScore:
    """Score documents, each cut into consecutive windows of `length` that share no context.

    Every token is predicted once, from a BOS token and what precedes it in its own window: on
    average half a window. End-of-sequence tokens are not counted.

    Args:
      documents: [n] token ids each, without special tokens.
      num_bytes: the UTF-8 bytes of all documents together.
    """
    windows = document_windows(documents, bos=bos, length=length)
    sum_losses = jax.jit(lambda params, part: token_loss(Decoder(base), params, part).sum())
    nats = sum(
        float(sum_losses(params, _part(windows, start, batch_size)))
        for start in range(0, len(windows.inputs), batch_size)
    )
    return HeldoutScore(nats, int(windows.weights.sum()), num_bytes)


def document_windows(documents: Sequence[np.ndarray], *, bos: int, length: int) -> Windows:
    """Cut each document by itself; the rest of its last window has weight 0."""
    # Padding with BOS gives weight 0, as a BOS is never predicted.
    padded = [np.pad(d, (0, -len(d) % length), constant_values=bos) for d in documents]
    return cut_windows(np.concatenate(padded).reshape(-1, length), bos)


def _part(windows: Windows, start: int, count: int) -> Windows:
    """Return `count` rows from `start`; missing ones are zero, and so of weight 0."""
    rows = [x[start : start + count] for x in windows]
    return Windows(*(np.pad(x, ((0, count - len(x)), (0, 0))) for x in rows))
