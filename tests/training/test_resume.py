"""Runs that were stopped, killed or repeated with other flags."""

import dataclasses
import json
import shutil
import signal
import threading

import pytest

from clover_jax.checkpoints.card import read_card
from clover_jax.errors import UserError
from clover_jax.training import run
from clover_jax.training.decoding_eval import DecodingEvaluator
from clover_jax.training.run import run_training
from clover_jax.training.settings import (
    TrainSettings,
    check_resumable,
    record_settings,
    recorded_settings,
)
from clover_jax.training.setup import load_inputs
from tests.conftest import PYTHON, rows_in, run_program
from tests.tiny_folders import save_tiny_base
from tests.training.conftest import StopAfter, assert_same_params, params_of, settings

pytestmark = pytest.mark.usefixtures("one_compiled_step")


@pytest.mark.parametrize("stop_after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(whole_run, data, tmp_path, stop_after):
    chosen = settings(data, eval_every=3)
    stopped = run_training(chosen, tmp_path / "w", StopAfter(stop_after))
    assert not stopped["finished"]
    assert 0 < stopped["steps"] < 6
    assert (tmp_path / "w" / "checkpoints" / str(stopped["steps"])).is_dir()
    report = run_training(chosen, tmp_path / "w", threading.Event())
    whole, _ = whole_run
    assert report["finished"]
    assert_same_params(params_of(tmp_path / "w"), params_of(whole))
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_times(tmp_path / "w" / name) == without_times(whole / name)


def test_overwrite_starts_again_and_keeps_foreign_files(whole_run, data, tmp_path):
    chosen = settings(data, eval_every=3)
    first = dataclasses.replace(chosen, learning_rate=1e-2, steps=2)
    run_training(first, tmp_path / "w", threading.Event())
    (tmp_path / "w" / "notes.txt").write_text("mine")
    with pytest.raises(UserError):
        broken = dataclasses.replace(chosen, overwrite=True, data=str(tmp_path / "nothing"))
        run_training(broken, tmp_path / "w", threading.Event())
    assert (tmp_path / "w" / "draft").is_dir(), "a mistake deletes nothing"
    again = dataclasses.replace(chosen, overwrite=True)
    assert run_training(again, tmp_path / "w", threading.Event())["steps"] == 6
    whole, _ = whole_run
    assert_same_params(params_of(tmp_path / "w"), params_of(whole))
    assert without_times(tmp_path / "w" / "metrics.jsonl") == without_times(whole / "metrics.jsonl")
    assert (tmp_path / "w" / "notes.txt").read_text() == "mine"
    # Without the flag the same run is finished.
    assert run_training(chosen, tmp_path / "w", threading.Event())["already_finished"]


@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_a_stop_after_a_measurement_keeps_the_measured_draft(
    data, tmp_path, monkeypatch, checkpoint_every
):
    class StopOnceMeasured(threading.Event):
        def is_set(self):
            path = tmp_path / "eval.jsonl"
            return path.exists() and path.stat().st_size > 0

    saved, save = [], run.Trainer.save
    monkeypatch.setattr(run.Trainer, "save", lambda *a: (saved.append(a[1]), save(*a)))
    chosen = settings(data, eval_every=3, checkpoint_every=checkpoint_every)
    report = run_training(chosen, tmp_path, StopOnceMeasured())
    assert (report["steps"], report["finished"], saved) == (3, False, [3])
    (measured,) = rows_in(tmp_path / "eval.jsonl")
    made = json.loads((tmp_path / "draft" / "draft.json").read_text())["provenance"]
    assert (made["steps"], made["tau"], made["measured"]) == (3, report["tau"], measured)


def without_times(path):
    timed = ("tokens_per_second", "data_wait")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows_in(path)]


def test_a_killed_run_goes_on_from_its_checkpoint(whole_run, data, tmp_path):
    source = (
        "import os, sys, threading; from clover_jax.training import outputs, run\n"
        "from clover_jax.training.settings import TrainSettings\n"
        "class Killer(threading.Event):\n"
        "    looks = 0\n"
        "    def is_set(self):\n"
        "        Killer.looks += 1\n"
        "        if Killer.looks == 6: os.kill(os.getpid(), 9)\n"
        "        return False\n"
        "run.run_training(TrainSettings.from_dict(eval(sys.argv[1])), "
        "__import__('pathlib').Path(sys.argv[2]), Killer())\n"
    )
    chosen = settings(data)
    arguments = repr(chosen.to_dict()), str(tmp_path / "w")
    run_program(*PYTHON, "-c", source, *arguments, status=-signal.SIGKILL)
    assert len(rows_in(tmp_path / "w" / "metrics.jsonl")) >= 4
    report = run_training(chosen, tmp_path / "w", threading.Event())
    assert report["finished"]
    assert [row["step"] for row in rows_in(tmp_path / "w" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert_same_params(params_of(tmp_path / "w"), params_of(whole_run[0]))


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    whole_run, data, tmp_path, capsys
):
    workdir = tmp_path / "w"
    chosen = settings(data, checkpoint_every=2)
    run_training(chosen, workdir, StopAfter(5))
    newest = max((workdir / "checkpoints").glob("[0-9]"))
    damaged = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    report = run_training(chosen, workdir, threading.Event())
    assert f"checkpoint {newest.name} is damaged" in capsys.readouterr().err
    assert report["finished"]
    assert_same_params(params_of(workdir), params_of(whole_run[0]))


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 4}, {"learning_rate": 0.5}, {"num_positions": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_change_that_makes_a_resume_wrong_is_refused(whole_run, data, change):
    (name,) = change
    with pytest.raises(UserError, match=f"--{name}="):
        run_training(settings(data, eval_every=3, **change), whole_run[0], threading.Event())


def test_flags_may_be_corrected_until_something_was_learned(data, tmp_path):
    run_training(settings(data), tmp_path, StopAfter(0))  # before the first step
    corrected = settings(data, learning_rate=0.5)
    run_training(corrected, tmp_path, StopAfter(0))
    assert recorded_settings(tmp_path) == corrected
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match="holds a run with --learning_rate=0.5, not 0.001"):
        run_training(settings(data), tmp_path, StopAfter(0))
    run_training(corrected, tmp_path, StopAfter(0))
    assert rows_in(tmp_path / "metrics.jsonl") == []  # it starts anew


def test_other_data_is_refused_and_the_same_elsewhere_accepted(whole_run, data, tmp_path):
    other = tmp_path / "rows.jsonl"
    other.write_text(data.read_text() + '{"prompt_ids": [1, 2], "output_ids": [3, 4, 5]}\n' * 5)
    with pytest.raises(UserError, match="another --data"):
        run_training(settings(other, eval_every=3), whole_run[0], threading.Event())
    moved = shutil.copy(data, tmp_path / "elsewhere.jsonl")
    report = run_training(settings(moved, eval_every=3), whole_run[0], threading.Event())
    assert report["already_finished"]


def test_a_run_that_goes_on_to_more_steps_is_not_finished_until_it_is(
    data, tmp_path, monkeypatch, capsys
):
    run_training(settings(data), tmp_path, threading.Event())
    # A finished run has done fewer steps too, which changes nothing of it and loads nothing.
    with monkeypatch.context() as changed:
        changed.setattr(run, "load_inputs", lambda *_: pytest.fail("loaded"))
        assert run_training(settings(data, steps=4), tmp_path, threading.Event())["steps"] == 6
    more = settings(data, steps=8)
    assert not run_training(more, tmp_path, StopAfter(1))["finished"]
    assert not (tmp_path / "result.json").exists()
    # The schedule of 6 steps: a warm-up of 2, then 1e-3 * (1 - (5 - 2 + 1) / 5) at the last.
    assert (
        "--steps=8 instead of 6 changes the schedule: the learning rate was 0.0002 at step 6 "
        "and is 0.000286 at step 7; it falls to 0 after step 8"
    ) in capsys.readouterr().err
    with pytest.raises(UserError, match="has done 7 steps, more than --steps=6"):
        run_training(settings(data), tmp_path, threading.Event())
    assert recorded_settings(tmp_path) == more  # a command that was refused changes nothing
    assert run_training(more, tmp_path, threading.Event())["finished"]
    assert not (tmp_path / "best").exists()
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 8
    assert "changes the schedule" not in capsys.readouterr().err


def test_the_report_is_of_the_head_in_best_after_a_resume_from_before_it(
    data, tmp_path, monkeypatch
):
    taus = iter([1.5, 2.5, 2.0])
    measured = DecodingEvaluator.measure

    def measure(evaluator, params, stop):
        return measured(evaluator, params, threading.Event()) | {"tau": next(taus)}

    monkeypatch.setattr(DecodingEvaluator, "measure", measure)
    chosen = settings(data, eval_every=2, checkpoint_every=2)
    run_training(chosen, tmp_path, StopAfter(4))  # steps 2 and 4 are measured
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    report = run_training(chosen, tmp_path, StopAfter(0))
    kept = read_card(tmp_path / "best").provenance
    assert [row["step"] for row in rows_in(tmp_path / "eval.jsonl")] == [2]
    assert (report["best_step"], report["tau"]) == (kept["steps"], kept["tau"]) == (4, 2.5)
    report = run_training(chosen, tmp_path, StopAfter(2))
    assert rows_in(tmp_path / "eval.jsonl")[-1]["tau"] == 2.0
    assert (report["best_step"], report["tau"]) == (4, 2.5)


def test_a_resume_from_before_the_draft_leaves_the_draft_of_its_step(data, tmp_path):
    run_training(settings(data, checkpoint_every=3), tmp_path, StopAfter(5))
    (later,) = (tmp_path / "checkpoints").glob("[456]")
    shutil.rmtree(later)  # as a kill leaves it that comes between a draft and its checkpoint
    report = run_training(settings(data, steps=3), tmp_path, threading.Event())
    assert report["finished"]
    assert read_card(tmp_path / "draft").provenance["steps"] == report["steps"] == 3


def test_a_head_goes_on_with_the_loss_it_began_with(data, tmp_path):
    """Also where that is no longer its method's own, which a run without --loss would have."""
    first = settings(data, steps=2, loss="regression=3,dpace=0")
    run_training(first, tmp_path, threading.Event())
    longer = dataclasses.replace(first, steps=3, loss=None)
    with pytest.raises(
        UserError, match="learned with another loss: pass --loss=regression=3.0,dpace=0.0, or"
    ):
        run_training(longer, tmp_path, threading.Event())
    asked = dataclasses.replace(longer, loss="regression=3.0,dpace=0.0")
    assert run_training(asked, tmp_path, threading.Event())["steps"] == 3


@pytest.mark.parametrize("name", ["chat_template", "tokenizer"])
def test_what_turns_records_into_samples_must_be_what_it_was(data, tmp_path, name):
    chosen = settings(data)
    now = {"base": "b", "data": "d", "tokenizer": "t", "chat_template": None}
    record_settings(tmp_path, chosen, now)
    check_resumable(tmp_path, chosen, now, learned=True)
    with pytest.raises(UserError, match=f"holds a run with another (--)?{name} \\("):
        check_resumable(tmp_path, chosen, now | {name: "other"}, learned=True)
    # A run of an earlier version recorded less.
    before = json.loads((tmp_path / "settings.json").read_text())
    del before["identity"][name]
    (tmp_path / "settings.json").write_text(json.dumps(before))
    check_resumable(tmp_path, chosen, now | {name: "other"}, learned=True)


def test_a_template_that_was_edited_in_place_is_refused(tmp_path):
    base = save_tiny_base(tmp_path / "base")
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "response": "b c a hat"}\n' * 4)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    given = {"base": str(base), "data": str(chats), "chat_template": str(template)}
    chosen = TrainSettings(**given, seq_len=32, steps=1)
    record_settings(tmp_path, chosen, load_inputs(chosen).identity)
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="holds a run with another --chat_template"):
        check_resumable(tmp_path, chosen, load_inputs(chosen).identity, learned=True)
