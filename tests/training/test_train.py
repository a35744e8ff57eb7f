"""The command `train`: flags, stopping by a signal, mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from clover_jax import cli, train
from clover_jax.cli.command_flags import parse_flags, settings_from
from clover_jax.training.settings import TrainSettings
from tests.conftest import REPOSITORY, WARNINGS

BASE = REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt_ids": [i, i + 1], "output_ids": list(range(i + 2, i + 20))} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(rows, workdir, **changes):
    values = {
        "base": BASE,
        "data": rows,
        "workdir": workdir,
        "steps": 4,
        "batch_size": 2,
        "seq_len": 32,
        "warmup_steps": 2,
        "log_every": 1,
        "eval_every": 0,
        "num_positions": 2,
        "num_augmenting_layers": 1,
    }
    return [f"--{name}={value}" for name, value in (values | changes).items()]


def run(capsys, *flags):
    status = cli.run(train.main, train.define_flags, list(flags))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_every_setting_is_a_flag_with_its_default():
    flags = parse_flags(train.define_flags, [])
    assert settings_from(flags, TrainSettings) == TrainSettings()
    assert set(flags) - set(TrainSettings().to_dict()) >= {"workdir", "mesh", "flagfile"}


def test_sigterm_saves_and_exits_with_status_0(data, tmp_path):
    workdir = tmp_path / "w"
    command = [sys.executable, *WARNINGS, "-m", "clover_jax.train"]
    process = subprocess.Popen(
        [*command, *arguments(data, workdir, steps=100_000)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        ({"seq_len": 2}, "--seq_len=2 must lie between 3"),
        ({"steps": 0}, "steps"),
        ({"mesh": "data=2"}, "--mesh=data=2 asks for 2 devices, but 1 is here"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"adam_b2": 1}, "adam_b2 (1.0) must be at least 0 and less than 1"),
        ({"target": "gpu-h200"}, "--target=gpu-h200 is for --dry_run; a run takes what is here"),
        ({"drafter_options": "colour=red"}, "a clover2 head has no option 'colour'; the options a"),
        (
            {"drafter": "clover", "tree": "paper25"},
            "tree 'paper25' is 5 deep; this clover head drafts at most 2 tokens",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_status_2(capsys, data, tmp_path, changes, message):
    status, out, err = run(capsys, *arguments(data, tmp_path / "w", **changes))
    assert status == 2
    assert out == ""
    (line,) = err.splitlines()
    assert message in line
    assert not (tmp_path / "w").exists()


def test_a_workdir_that_cannot_be_made_is_one_line(capsys, data, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run(capsys, *arguments(data, tmp_path / "file" / "w"))
    assert status == 2
    (line,) = err.splitlines()
    assert f"{tmp_path}/file" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_workdir_is_one_line(capsys, data, tmp_path):
    tmp_path.chmod(0o500)
    status, _, err = run(capsys, *arguments(data, tmp_path / "w"))
    assert status == 2
    assert "Permission denied" in err


def test_help_says_how_a_run_is_stopped_and_resumed(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert "SIGTERM" in out
    assert "--num_augmenting_layers" in out
