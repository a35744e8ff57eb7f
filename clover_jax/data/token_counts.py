"""Which tokens the training data consist of, and the most frequent ones as a draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from clover_jax.data.samples import Samples
from clover_jax.errors import UserError


class DraftVocabulary(NamedTuple):
    """A part of the base's vocabulary.

    ids: ascending.
    coverage: share of the counted tokens that are among them.
    """

    ids: tuple[int, ...]
    coverage: float


def count_tokens(samples: Samples, vocab_size: int) -> np.ndarray:
    """Return [vocab_size] how often each token is one that the base is imitated on."""
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(samples)):
        sample = samples[index]
        counts += np.bincount(sample.tokens[sample.loss_mask], minlength=vocab_size)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """Return the `size` most frequent tokens; `always` are among them however rare.

    Among equally frequent ones the lower id comes first.
    Raises UserError for a size that cannot be.

    Example: counts [5, 0, 3, 0, 9], size 3, always [1] give ids (0, 1, 4).
    """
    wanted = sorted(set(always))
    if not max(len(wanted), 1) <= size <= len(counts):
        raise UserError(
            f"--draft_vocab={size} must lie between {max(len(wanted), 1)} (the special tokens) "
            f"and {len(counts)}, the base's vocabulary"
        )

    # Stable, so that ties go by id on every machine.
    rank = np.argsort(-counts, kind="stable")
    others = rank[~np.isin(rank, wanted)][: size - len(wanted)]
    ids = np.sort(np.concatenate([np.array(wanted, np.int64), others]))
    # Without a counted token the coverage is 0.
    coverage = counts[ids].sum() / max(counts.sum(), 1)
    return DraftVocabulary(tuple(ids.tolist()), float(coverage))
