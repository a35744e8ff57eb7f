"""What a run says of a loss that is not finite, of memory, disks and a second process."""

import errno
import os
import threading

import jax
import numpy as np
import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import checkpoint
from clover_jax.runtime.files import only_process_in
from clover_jax.training import outputs, trainer
from clover_jax.training.run import run_training
from tests.training.small_runs import (
    StopAfter,
    assert_same_params,
    cached_step,
    params_of,
    settings,
)

pytestmark = pytest.mark.usefixtures("one_compiled_step")


def test_a_loss_that_is_not_finite_stops_with_its_step(data, tmp_path, monkeypatch):
    def poisoned(config):
        step = cached_step(config)

        def run_step(state, base_params, batch):
            state, metrics = step(state, base_params, batch)
            if int(state.step) == 5:
                metrics = metrics.replace(loss=metrics.loss * np.nan)
            return state, metrics

        return run_step

    monkeypatch.setattr(trainer, "make_train_step", poisoned)
    with pytest.raises(UserError, match=r"the loss is nan at step 5; .* that of step 3"):
        run_training(settings(data), tmp_path / "w", threading.Event())
    assert sorted(p.name for p in (tmp_path / "w" / "checkpoints").glob("[0-9]")) == ["3"]


def test_too_little_memory_says_what_to_do(data, tmp_path, monkeypatch):
    def run_step(state, base_params, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(trainer, "make_train_step", lambda config: run_step)
    message = (
        "the device has too little memory to train on 2 rows of 32 tokens; give "
        "--gradient_accumulation_steps, --remat, a smaller --batch_size or --seq_len, or more "
    )
    with pytest.raises(UserError, match=message):
        run_training(settings(data), tmp_path / "w", threading.Event())


def test_a_second_run_in_the_same_workdir_is_refused(data, tmp_path):
    with (
        only_process_in(tmp_path, "is training", "--workdir"),
        pytest.raises(UserError, match="another run is training"),
    ):
        run_training(settings(data), tmp_path, threading.Event())


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(*arguments, **named):
    raise FULL


@pytest.mark.parametrize(
    "module, name, message",
    [
        (checkpoint, "write_json", r"the disk is full; .*\(checkpoint \d is whole"),
        (outputs, "write_native", r"cannot write .*/draft: the disk is full"),
    ],
    ids=["checkpoint", "draft"],
)
def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(
    whole_run, data, tmp_path, monkeypatch, module, name, message
):
    workdir = tmp_path / "w"
    run_training(settings(data), workdir, StopAfter(4))
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        with pytest.raises(UserError, match=message):
            run_training(settings(data), workdir, threading.Event())
    report = run_training(settings(data), workdir, threading.Event())
    assert report["finished"]
    assert_same_params(params_of(workdir), params_of(whole_run[0]))
