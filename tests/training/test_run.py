"""Whole runs of `train` on a tiny base: the clock, what they write, faults of device and disk."""

import errno
import json
import os
import shutil
import threading

import jax
import jax.monitoring
import numpy as np
import pytest

from clover_jax import train
from clover_jax.checkpoints.card import native_directory, read_card
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.evaluation import conversion
from clover_jax.evaluation.options import ConvertOptions
from clover_jax.runtime import checkpoint, compile_clock
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.files import only_process_in
from clover_jax.training import outputs, run
from clover_jax.training.run import Clock, run_training
from clover_jax.training.settings import recorded_settings
from tests.conftest import rows_in
from tests.training.conftest import (
    BASE,
    StopAfter,
    assert_same_params,
    cached_step,
    params_of,
    settings,
)

pytestmark = pytest.mark.usefixtures("one_compiled_step")


@pytest.fixture
def now(monkeypatch):
    """A clock in a list, so that no test depends on how fast the machine is."""
    time = [100.0]
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: time[0])
    return time


def test_tokens_per_second_leave_out_compiling_and_pauses(now):
    with CompileClock() as compiling:
        clock = Clock(compiling)
        with clock.waiting():
            now[0] += 1
        now[0] += 50  # the first step
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", 46.0)
        clock.count(100)
        with clock.paused():
            now[0] += 30  # a measurement, which compiles too
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", 20.0)
        assert clock.read() == pytest.approx((20.0, 0.2))
        now[0] += 2
        clock.count(100)
        assert clock.read() == pytest.approx((50.0, 0.0))


def test_a_draft_holds_the_tree_that_a_file_held(data, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    named = settings(data, steps=1, tree=f"file:{tmp_path / 'tree.json'}")
    run_training(named, tmp_path / "run", threading.Event())
    assert read_card(tmp_path / "run" / "draft").tree == "paths:0/1/0.0"


def test_a_run_writes_metrics_eval_and_both_drafts(whole_run):
    workdir, report = whole_run
    metrics = rows_in(workdir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(len(metrics[0][name]) == 3 for name in ("soft_ce", "regression", "accuracy"))
    evaluated = rows_in(workdir / "eval.jsonl")
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
    for row in evaluated:
        assert row["tau"] == row["tokens"] / row["forwards"]
        assert row["hit_rate"] == sorted(row["hit_rate"], reverse=True)
    # The command's last line names the head that --draft=WORKDIR uses.
    last_line = train._summary(report).splitlines()[-1]
    best = native_directory(workdir)
    assert last_line == f"best head: {best}, tau {report['tau']:.2f} (temperature 0, chain:3)"


def test_converting_a_workdir_takes_its_best_head_with_its_provenance(whole_run, tmp_path):
    workdir, report = whole_run
    spec, out = ModelSpec(str(BASE)), tmp_path / "out"
    conversion.convert(ConvertOptions(spec, input=str(workdir), output=str(out)))
    card = read_card(out)
    wanted = {"converted_from": str(workdir), "steps": report["best_step"], "tau": report["tau"]}
    assert wanted.items() <= card.provenance.items()
    assert card.tree == "chain:3"
    assert_same_params(params_of(tmp_path, "out"), params_of(workdir, "best"))


def test_a_finished_workdir_says_so_and_where_it_is_now(
    whole_run, data, tmp_path, monkeypatch, capsys
):
    workdir, report = whole_run
    monkeypatch.setattr(run.Trainer, "run", lambda *a: pytest.fail("trained again"))
    again = run_training(settings(data, eval_every=3), workdir, threading.Event())
    assert again == report | {"already_finished": True}
    # What was measured stays on record as it was.
    told = settings(data, eval_every=3, eval_num_prompts=1, tree="chain:2")
    assert run_training(told, workdir, threading.Event()) == again
    said = "so --eval_num_prompts, --tree has no effect; `evaluate` measures its head"
    assert said in capsys.readouterr().err
    assert recorded_settings(workdir) == settings(data, eval_every=3)
    moved = shutil.copytree(whole_run[0], tmp_path / "moved")
    report = run_training(settings(data, eval_every=3), moved, threading.Event())
    places = [report[name] for name in ("workdir", "draft", "best")]
    assert places == [str(moved), str(moved / "draft"), str(moved / "best")]


def test_a_loss_that_is_not_finite_stops_with_its_step(data, tmp_path, monkeypatch):
    def poisoned(config):
        step = cached_step(config)

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
    message = "too little memory to train on 2 rows of 32 tokens; give --gradient_acc.*, --remat, "
    with pytest.raises(UserError, match=message):
        run_training(settings(data), tmp_path / "w", threading.Event())


def test_a_second_run_in_the_same_workdir_is_refused(data, tmp_path):
    refused = pytest.raises(UserError, match="another run is training")
    with only_process_in(tmp_path, "is training", "--workdir"), refused:
        run_training(settings(data), tmp_path, threading.Event())


def fail(*arguments, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
