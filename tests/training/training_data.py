"""Runs of six steps on a base of two layers; batches and heads for the tests of training."""

import dataclasses
import itertools
import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project
from clover_jax.training.settings import TrainSettings
from clover_jax.training.step import make_train_step
from tests.conftest import REPOSITORY


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
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
        loss_mask=jnp.asarray(loss_mask),
    )


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


BASE = REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base"

_STEPS = {}


def cached_step(config):
    """Return the compiled step, which is kept from run to run."""
    # The schedule of six steps serves longer runs too: compiling is what takes time here.
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, steps=6))
    return _STEPS.setdefault(config, make_train_step(config))


def settings(data, **changes):
    values = {
        "base": str(BASE),
        "data": str(data),
        "steps": 6,
        "batch_size": 2,
        "seq_len": 32,
        "warmup_steps": 2,
        "log_every": 1,
        "checkpoint_every": 3,
        "eval_every": 0,
        "tree": "chain:3",
        "eval_num_prompts": 2,
        "eval_max_new_tokens": 8,
        "num_augmenting_layers": 1,
        "num_positions": 3,
    }
    return TrainSettings(**(values | changes))


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def params_of(workdir, name="draft"):
    return load_draft(workdir / name, load_base(str(BASE))).params


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class StopAfter(threading.Event):
    """A stop request that comes in the middle of step `count`; 0: before the first."""

    def __init__(self, count):
        super().__init__()
        self._left = count

    def is_set(self):
        self._left -= 1
        return self._left < 0
