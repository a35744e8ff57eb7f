"""Runs of six steps on a base of two layers, and what they leave, for the tests of training."""

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.training import run
from clover_jax.training.run import run_training
from clover_jax.training.settings import TrainSettings
from clover_jax.training.step import make_train_step
from tests.conftest import REPOSITORY, rows_in

BASE = REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base"

_STEPS = {}


def cached_step(config):
    """Return the compiled step, which is kept from run to run."""
    # The schedule of six steps serves longer runs too: compiling is what takes time here.
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, steps=6))
    return _STEPS.setdefault(config, make_train_step(config))


def settings(data, **changes):
    values = {"base": str(BASE), "data": str(data), "tree": "chain:3"}
    values |= {"steps": 6, "warmup_steps": 2, "log_every": 1, "checkpoint_every": 3}
    values |= {"eval_every": 0, "eval_num_prompts": 2, "eval_max_new_tokens": 8}
    values |= {"num_augmenting_layers": 1, "num_positions": 3, "batch_size": 2, "seq_len": 32}
    return TrainSettings(**(values | changes))


def counting_rows(folder):
    """Write 30 rows of counting; return their file."""
    path = folder / "rows.jsonl"
    rows = [{"prompt_ids": [i, i + 1], "output_ids": list(range(i + 2, i + 20))} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses_of(workdir):
    return [row["loss"] for row in rows_in(workdir / "metrics.jsonl")]


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


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Token rows of noisy counting, as `generate --output` would write them."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(80):
            start, length = rng.integers(0, 60), rng.integers(8, 30)
            ids = (start + np.arange(length)).tolist()
            file.write(json.dumps({"prompt_ids": ids[:4], "output_ids": ids[4:]}) + "\n")
    return path


@pytest.fixture
def one_compiled_step(monkeypatch):
    """Keep the compiled step from run to run."""
    monkeypatch.setattr(run, "make_train_step", cached_step)


@pytest.fixture(scope="session")
def whole_run(data, tmp_path_factory):
    """The workdir and the report of a run that nothing stopped."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    report = run_training(settings(data, eval_every=3), workdir, threading.Event())
    return workdir, report
