"""Ten times killed without warning, at steps drawn at random, and the same head in the end."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.conftest import PYTHON, REPOSITORY
from tests.training.conftest import BASE, assert_same_params, counting_rows, losses_of, params_of

STEPS, KILLS = 60, 10


@pytest.mark.slow
def test_ten_kills_leave_the_parameters_of_an_uninterrupted_run(tmp_path):
    flags = {
        "base": BASE,
        "data": counting_rows(tmp_path),
        "steps": STEPS,
        "batch_size": 2,
        "seq_len": 32,
    }
    flags |= {"num_positions": 2, "num_augmenting_layers": 1, "log_every": 1, "seq_len": 32}
    flags |= {"checkpoint_every": 3, "eval_every": 0, "gradient_accumulation_steps": 2}

    def start(workdir):
        given = [f"--{name}={value}" for name, value in (flags | {"workdir": workdir}).items()]
        command = [*PYTHON, "-m", "clover_jax.train", *given]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)

    def finish(workdir):
        process = start(workdir)
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
        return errors

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole)
    seed = int(os.environ.get("CLOVER_JAX_KILLS_SEED", "0"))
    drawn = np.random.default_rng(seed).choice(np.arange(1, STEPS), KILLS, replace=False)
    for step in sorted(drawn):
        process = start(killed)
        while logged(killed) < step:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert "from step" in finish(killed)
    assert_same_params(params_of(killed), params_of(whole))
    assert losses_of(killed) == losses_of(whole)
    assert len(losses_of(killed)) == STEPS


def logged(workdir):
    """Return the last step in the log of a run that may be writing it."""
    log = workdir / "metrics.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0
