"""Ten times killed without warning, at steps drawn at random, and the same head in the end."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from tests.conftest import REPOSITORY, WARNINGS

BASE = REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base"
STEPS, KILLS = 60, 10


@pytest.mark.slow
def test_ten_kills_leave_the_parameters_of_an_uninterrupted_run(tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt_ids": [i, i + 1], "output_ids": list(range(i + 2, i + 20))} for i in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"base": BASE, "data": data, "steps": STEPS, "batch_size": 2, "seq_len": 32}
    flags |= {"num_positions": 2, "num_augmenting_layers": 1, "log_every": 1}
    flags |= {"checkpoint_every": 3, "eval_every": 0, "gradient_accumulation_steps": 2}

    def start(workdir):
        given = [f"--{name}={value}" for name, value in (flags | {"workdir": workdir}).items()]
        command = [sys.executable, *WARNINGS, "-m", "clover_jax.train", *given]
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
    ours, theirs = (load_draft(w / "draft", load_base(str(BASE))).params for w in (killed, whole))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert losses(killed) == losses(whole)
    assert len(losses(killed)) == STEPS


def logged(workdir):
    """Return the last step in the log of a run that may be writing it."""
    log = workdir / "metrics.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
