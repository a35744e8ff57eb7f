"""Whole runs of `train` on a tiny base: what they write."""

import json
import shutil
import threading

import pytest

from clover_jax import train
from clover_jax.checkpoints.card import native_directory, read_card
from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import conversion
from clover_jax.evaluation.options import ConvertOptions
from clover_jax.training import trainer
from clover_jax.training.run import run_training
from tests.training.small_runs import BASE, assert_same_params, params_of, rows, settings

pytestmark = pytest.mark.usefixtures("one_compiled_step")


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


def test_tau_and_hit_rates_agree(whole_run):
    for row in rows(whole_run[0] / "eval.jsonl"):
        assert row["tau"] == row["tokens"] / row["forwards"]
        assert row["hit_rate"] == sorted(row["hit_rate"], reverse=True)


def test_a_finished_workdir_says_so_and_trains_nothing(whole_run, data, monkeypatch):
    workdir, report = whole_run
    monkeypatch.setattr(trainer.Trainer, "run", lambda *a: pytest.fail("trained again"))
    again = run_training(settings(data, eval_every=3), workdir, threading.Event())
    assert again == report | {"already_finished": True}


def test_a_finished_workdir_that_was_moved_says_where_it_is_now(whole_run, data, tmp_path):
    moved = shutil.copytree(whole_run[0], tmp_path / "moved")
    report = run_training(settings(data, eval_every=3), moved, threading.Event())
    places = {name: report[name] for name in ("workdir", "draft", "best")}
    assert places == {
        "workdir": str(moved),
        "draft": str(moved / "draft"),
        "best": str(moved / "best"),
    }
