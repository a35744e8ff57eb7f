"""Runs of six steps on a base of two layers, and what they leave, for the tests of training."""

import dataclasses
import json
import threading
from pathlib import Path

import jax
import numpy as np

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.training.settings import TrainSettings
from clover_jax.training.step import make_train_step
from tests.conftest import REPOSITORY

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
