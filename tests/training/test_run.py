"""Whole runs of `train` on a tiny base: files, resume, faults."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from clover_jax import checkpoint
from clover_jax.drafters.directory import load_draft, read_card
from clover_jax.errors import UserError
from clover_jax.files import only_process_in
from clover_jax.interchange import conversion
from clover_jax.models.loading import load_base
from clover_jax.training import outputs, run, trainer
from clover_jax.training.run import run_training
from clover_jax.training.settings import TrainSettings, recorded_settings
from clover_jax.training.step import make_train_step
from tests.conftest import REPOSITORY, WARNINGS

BASE = REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base"


@pytest.fixture(scope="module")
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


@pytest.fixture(autouse=True)
def one_compiled_step(monkeypatch):
    """Keep the compiled step from run to run."""
    monkeypatch.setattr(run, "make_train_step", lambda config: _cached(config))


_STEPS = {}


def _cached(config):
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
    """A stop request that comes once `count` steps were looked at."""

    def __init__(self, count):
        super().__init__()
        self._left = count

    def is_set(self):
        self._left -= 1
        return self._left < 0


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    report = run_training(settings(data, eval_every=3), workdir, threading.Event())
    return workdir, report


def test_a_draft_holds_the_tree_that_a_file_held(data, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    named = settings(data, steps=1, tree=f"file:{tmp_path / 'tree.json'}")
    run_training(named, tmp_path / "run", threading.Event())
    assert read_card(tmp_path / "run" / "draft").tree == "paths:0/1/0.0"


def test_a_run_writes_metrics_eval_and_both_drafts(whole_run):
    workdir, report = whole_run
    metrics = rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(len(metrics[0][name]) == 3 for name in ("soft_ce", "regression", "accuracy"))
    evaluated = rows(workdir / "eval.jsonl")
    assert [row["step"] for row in evaluated] == [3, 6]
    assert all(row["equal"] == row["prompts"] == 2 for row in evaluated)
    assert evaluated[0]["measured_with"] == evaluated[1]["measured_with"]
    assert evaluated[0]["measured_with"]["tree"] == "chain:3"
    assert report["finished"]
    assert report["tau"] == max(row["tau"] for row in evaluated)
    card = json.loads((workdir / "draft" / "draft.json").read_text())
    assert card["provenance"]["steps"] == 6
    assert card["provenance"]["tau"] == evaluated[-1]["tau"]
    assert card["tree"] == "chain:3"
    assert (workdir / "best" / "draft.json").is_file()
    assert list((workdir / "tensorboard").iterdir())


def test_the_hubs_card_tells_of_a_trained_head(whole_run, data, tmp_path):
    """`convert --push` finds in the draft what the run recorded."""
    workdir, report = whole_run
    out = tmp_path / "out"
    options = {"input": str(workdir), "output": str(out), "base": str(BASE), "to": "orbax"}
    published = conversion.convert(
        conversion.ConvertOptions(**options, push="me/head", card_only=True)
    )
    assert (published["repository"], published["uploaded"]) == ("me/head", None)
    made = json.loads((out / "draft.json").read_text())["provenance"]
    assert made["converted_from"] == str(workdir)
    card = (out / "README.md").read_text().splitlines()
    assert f"| data | {data} |" in card
    assert f"| data (SHA-256) | {made['data_hash']} |" in card
    assert f"| steps | {report['best_step']} |" in card
    assert f"| tau | {report['tau']} |" in card
    assert "| tree | chain:3 |" in card
    assert_same_params(params_of(tmp_path, "out"), params_of(workdir, "best"))


def test_tau_and_hit_rates_agree(whole_run):
    for row in rows(whole_run[0] / "eval.jsonl"):
        assert row["tau"] == row["tokens"] / row["forwards"]
        assert row["hit_rate"] == sorted(row["hit_rate"], reverse=True)


def test_a_finished_workdir_says_so_and_trains_nothing(whole_run, data, monkeypatch):
    workdir, report = whole_run
    monkeypatch.setattr(trainer.Trainer, "run", lambda *a: pytest.fail("trained again"))
    again = run_training(settings(data, eval_every=3), workdir, threading.Event())
    assert again == report | {"already_finished": True}


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_stopped_run_goes_on_bit_for_bit(whole_run, data, tmp_path, stop_after):
    chosen = settings(data, eval_every=3)
    stopped = run_training(chosen, tmp_path / "w", StopAfter(2 * stop_after))
    assert not stopped["finished"]
    assert 0 < stopped["steps"] < 6
    report = run_training(chosen, tmp_path / "w", threading.Event())
    whole, _ = whole_run
    assert report["finished"]
    assert_same_params(params_of(tmp_path / "w"), params_of(whole))
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_times(tmp_path / "w" / name) == without_times(whole / name)


@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_a_stop_after_a_measurement_keeps_the_measured_draft(
    data, tmp_path, monkeypatch, checkpoint_every
):
    class StopOnceMeasured(threading.Event):
        def is_set(self):
            path = tmp_path / "eval.jsonl"
            return path.exists() and path.stat().st_size > 0

    saved, save = [], trainer.Trainer.save
    monkeypatch.setattr(trainer.Trainer, "save", lambda *a: (saved.append(a[1]), save(*a)))
    chosen = settings(data, eval_every=3, checkpoint_every=checkpoint_every)
    report = run_training(chosen, tmp_path, StopOnceMeasured())
    assert (report["steps"], report["finished"], saved) == (3, False, [3])
    (measured,) = rows(tmp_path / "eval.jsonl")
    made = json.loads((tmp_path / "draft" / "draft.json").read_text())["provenance"]
    assert (made["steps"], made["tau"], made["measured"]) == (3, report["tau"], measured)


def without_times(path):
    timed = ("tokens_per_second", "data_wait")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows(path)]


def test_a_killed_run_goes_on_from_its_checkpoint(whole_run, data, tmp_path):
    source = (
        "import os, sys, threading; from clover_jax.training import outputs, run, trainer\n"
        "from clover_jax.training.settings import TrainSettings\n"
        "class Killer(threading.Event):\n"
        "    looks = 0\n"
        "    def is_set(self):\n"
        "        Killer.looks += 1\n"
        "        if Killer.looks == 10: os.kill(os.getpid(), 9)\n"
        "        return False\n"
        "run.run_training(TrainSettings.from_dict(eval(sys.argv[1])), "
        "__import__('pathlib').Path(sys.argv[2]), Killer())\n"
    )
    chosen = settings(data)
    killed = subprocess.run(
        [sys.executable, *WARNINGS, "-c", source, repr(chosen.to_dict()), str(tmp_path / "w")],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(rows(tmp_path / "w" / "metrics.jsonl")) >= 4
    report = run_training(chosen, tmp_path / "w", threading.Event())
    assert report["finished"]
    assert [row["step"] for row in rows(tmp_path / "w" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert_same_params(params_of(tmp_path / "w"), params_of(whole_run[0]))


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    whole_run, data, tmp_path, capsys
):
    workdir = tmp_path / "w"
    chosen = settings(data, checkpoint_every=2)
    run_training(chosen, workdir, StopAfter(4 * 2 + 1))
    newest = max((workdir / "checkpoints").glob("[0-9]"))
    damaged = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    report = run_training(chosen, workdir, threading.Event())
    assert f"checkpoint {newest.name} is damaged" in capsys.readouterr().err
    assert report["finished"]
    assert_same_params(params_of(workdir), params_of(whole_run[0]))


def test_a_loss_that_is_not_finite_stops_with_its_step(data, tmp_path, monkeypatch):
    def poisoned(config):
        step = _cached(config)

        def run_step(state, base_params, batch):
            state, metrics = step(state, base_params, batch)
            if int(state.step) == 5:
                metrics = metrics.replace(loss=metrics.loss * np.nan)
            return state, metrics

        return run_step

    monkeypatch.setattr(run, "make_train_step", poisoned)
    with pytest.raises(UserError, match=r"the loss is nan at step 5; .* that of step 3"):
        run_training(settings(data), tmp_path / "w", threading.Event())
    assert sorted(p.name for p in (tmp_path / "w" / "checkpoints").glob("[0-9]")) == ["3"]


def test_too_little_memory_says_what_to_do(data, tmp_path, monkeypatch):
    def run_step(state, base_params, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(run, "make_train_step", lambda config: run_step)
    message = (
        "the device has too little memory to train on 2 rows of 32 tokens; give "
        "--gradient_accumulation_steps, --remat, a smaller --batch_size or --seq_len, or more "
    )
    with pytest.raises(UserError, match=message):
        run_training(settings(data), tmp_path / "w", threading.Event())


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 4}, {"learning_rate": 0.5}, {"num_positions": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_change_that_makes_a_resume_wrong_is_refused(whole_run, data, change):
    (name,) = change
    with pytest.raises(UserError, match=f"--{name}="):
        run_training(settings(data, eval_every=3, **change), whole_run[0], threading.Event())


def test_flags_may_be_corrected_until_something_was_learnt(data, tmp_path):
    run_training(settings(data), tmp_path, StopAfter(0))  # before the first step
    corrected = settings(data, learning_rate=0.5)
    run_training(corrected, tmp_path, StopAfter(0))
    assert recorded_settings(tmp_path) == corrected
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match="holds a run with --learning_rate=0.5, not 0.001"):
        run_training(settings(data), tmp_path, StopAfter(0))
    run_training(corrected, tmp_path, StopAfter(0))
    assert rows(tmp_path / "metrics.jsonl") == []  # it starts anew


def test_other_data_is_refused(whole_run, data, tmp_path):
    other = tmp_path / "rows.jsonl"
    other.write_text(data.read_text() + '{"prompt_ids": [1, 2], "output_ids": [3, 4, 5]}\n' * 5)
    with pytest.raises(UserError, match="another --data"):
        run_training(settings(other, eval_every=3), whole_run[0], threading.Event())


def test_the_same_data_elsewhere_is_accepted(whole_run, data, tmp_path):
    moved = shutil.copy(data, tmp_path / "elsewhere.jsonl")
    report = run_training(settings(moved, eval_every=3), whole_run[0], threading.Event())
    assert report["already_finished"]


def test_a_second_run_in_the_same_workdir_is_refused(data, tmp_path):
    with (
        only_process_in(tmp_path, "is training", "--workdir"),
        pytest.raises(UserError, match="another run is training"),
    ):
        run_training(settings(data), tmp_path, threading.Event())


def test_more_steps_continue_a_finished_run(data, tmp_path):
    run_training(settings(data), tmp_path, threading.Event())
    report = run_training(settings(data, steps=7), tmp_path, threading.Event())
    assert report["steps"] == 7
    assert not (tmp_path / "best").exists()


def test_fewer_steps_than_are_done_are_refused(data, tmp_path):
    run_training(settings(data, checkpoint_every=2), tmp_path, StopAfter(4 * 2 + 1))
    with pytest.raises(UserError, match=r"has done \d+ steps, more than --steps=1"):
        run_training(settings(data, steps=1), tmp_path, threading.Event())


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(*arguments, **named):
    raise FULL


@pytest.mark.parametrize(
    "module, name, message",
    [
        (checkpoint, "write_json", r"the disk is full; .*\(checkpoint \d is whole"),
        (outputs, "save_draft", r"cannot write .*/draft: the disk is full"),
    ],
    ids=["checkpoint", "draft"],
)
def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(
    whole_run, data, tmp_path, monkeypatch, module, name, message
):
    workdir = tmp_path / "w"
    run_training(settings(data), workdir, StopAfter(2 * 3 + 1))
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        with pytest.raises(UserError, match=message):
            run_training(settings(data), workdir, threading.Event())
    report = run_training(settings(data), workdir, threading.Event())
    assert report["finished"]
    assert_same_params(params_of(workdir), params_of(whole_run[0]))


def test_a_disk_without_room_is_found_out_before_anything_is_written(data, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"the disk is full; .*no checkpoint was saved yet"):
        run_training(settings(data), tmp_path, threading.Event())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["hashes"]
