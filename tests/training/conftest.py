"""Fixtures of the tests of training."""

import json
import threading

import numpy as np
import pytest

from clover_jax.training import run
from clover_jax.training.run import run_training
from tests.training.training_data import cached_step, settings


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
