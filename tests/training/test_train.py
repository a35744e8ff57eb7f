"""The command `train`: flags, mistakes in one line, signals, and ten kills at random steps."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from clover_jax import train
from clover_jax.cli.command_flags import parse_flags, settings_from
from clover_jax.training.settings import TrainSettings
from tests.conftest import PYTHON, REPOSITORY, run_command
from tests.training.conftest import BASE, assert_same_params, counting_rows, losses_of, params_of


@pytest.fixture
def arguments(tmp_path):
    """A function that gives the flags of a small run, with changes."""
    values = {"base": BASE, "data": counting_rows(tmp_path), "workdir": tmp_path / "w"}
    values |= {"steps": 4, "batch_size": 2, "seq_len": 32, "warmup_steps": 2, "log_every": 1}
    values |= {"eval_every": 0, "num_positions": 2, "num_augmenting_layers": 1}
    return lambda **changes: [f"--{name}={value}" for name, value in (values | changes).items()]


def test_every_setting_is_a_flag_with_its_default():
    flags = parse_flags(train.define_flags, [])
    assert settings_from(flags, TrainSettings) == TrainSettings()
    assert set(flags) - set(TrainSettings().to_dict()) >= {"workdir", "mesh", "flagfile"}


def test_sigterm_saves_and_exits_with_status_0(arguments, tmp_path):
    workdir, pipe = tmp_path / "w", subprocess.PIPE
    command = [*PYTHON, "-m", "clover_jax.train", *arguments(steps=100_000)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)
    metrics = workdir / "metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert not report["finished"]
    assert (workdir / "checkpoints" / str(report["steps"])).is_dir()
    assert (workdir / "draft" / "draft.json").is_file()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"drafter": "clover9"}, "drafter 'clover9' is unknown"),
        ({"data": "/missing.txt"}, "--data=/missing.txt: no such file"),
        ({"base": "/missing"}, "/missing"),
        ({"tree": "oak"}, "tree 'oak' is unknown"),
        ({"seq_len": 3}, "--seq_len=3 must lie between 4"),
        ({"steps": 0}, "steps"),
        ({"mesh": "data=2"}, "--mesh=data=2 asks for 2 devices, but 1 is here"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"adam_b2": 1}, "adam_b2 (1.0) must be at least 0 and less than 1"),
        ({"target": "gpu-h200"}, "--target=gpu-h200 is for --dry_run; a run takes what is here"),
        ({"drafter_options": "color=red"}, "a clover2 head has no option 'color'; the options a"),
        ({"drafter": "clover", "tree": "paper25"}, "5 deep; this clover head drafts at most 2 tok"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, tmp_path, changes, message):
    status, out, error = run_command(capsys, train, *arguments(**changes))
    assert (status, out, error.count("\n")) == (2, [], 1)
    assert message in error
    assert not (tmp_path / "w").exists()


def test_a_workdir_that_cannot_be_made_is_one_line(capsys, arguments):
    status, _, error = run_command(capsys, train, *arguments(workdir=f"{__file__}/w"))
    assert (status, error.count("\n")) == (2, 1)
    assert __file__ in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_workdir_is_one_line(capsys, arguments, tmp_path):
    flags = arguments()
    tmp_path.chmod(0o500)
    status, _, error = run_command(capsys, train, *flags)
    assert (status, "Permission denied" in error) == (2, True)


def test_help_says_how_a_run_is_stopped_and_resumed(capsys):
    status, out, _ = run_command(capsys, train, "--help")
    assert status == 0
    assert "SIGTERM" in "".join(out)
    assert "--num_augmenting_layers" in "".join(out)


STEPS, KILLS = 60, 10


@pytest.mark.slow
def test_ten_kills_leave_the_parameters_of_an_uninterrupted_run(tmp_path):
    flags = {"base": BASE, "data": counting_rows(tmp_path), "steps": STEPS, "batch_size": 2}
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
