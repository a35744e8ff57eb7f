"""Batches and heads for the tests of training."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project


def random_batch(rows=3, size=20, vocab_size=96, seed=0, num_segments=3, padding=3):
    """Return rows packed with a few documents, a ragged end and a spotty loss mask."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, size))
    segment_ids, positions = np.zeros((rows, size), np.int32), np.zeros((rows, size), np.int32)
    for row in range(rows):
        inner = rng.choice(np.arange(1, size - padding), num_segments - 1, replace=False)
        borders = [0, *sorted(inner), size - padding]
        for segment, (start, end) in enumerate(itertools.pairwise(borders), start=1):
            segment_ids[row, start:end] = segment
            positions[row, start:end] = np.arange(end - start)
    loss_mask = rng.random((rows, size)) < 0.7
    return Batch(*map(jnp.asarray, (tokens.astype(np.int32), segment_ids, positions, loss_mask)))


@dataclasses.dataclass(frozen=True)
class OwnMatrixModule:
    """A head module with an output matrix of its own per position, of which P are given."""

    output_params = ("heads",)
    rescores = False

    def apply(self, variables, frozen, hidden, position, method):
        """Return logits of one position."""
        assert method == "logits"
        return project(variables["params"]["heads"][position], hidden)


@dataclasses.dataclass(frozen=True)
class OwnMatrixHead(DraftHead):
    """A head whose module owns its output matrices."""

    module: OwnMatrixModule = OwnMatrixModule()


def random_states(base_params, batch, num_positions, seed=0):
    """Return (frozen, hidden [P, B, S, D], target states [B, S, D])."""
    frozen = frozen_from_base(base_params)
    width = frozen.lm_head.shape[1]
    hidden_key, state_key = jax.random.split(jax.random.key(seed))
    hidden = jax.random.normal(hidden_key, (num_positions, *batch.tokens.shape, width))
    states = 3 * jax.random.normal(state_key, (*batch.tokens.shape, width))
    return frozen, 2 * hidden, states
