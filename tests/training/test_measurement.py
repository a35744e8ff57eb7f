import contextlib
import io
import threading
import types

from clover_jax.runtime.jsonl import append_row
from clover_jax.runtime.progress import progress_bar
from clover_jax.training.decoding_eval import DecodingReport
from clover_jax.training.outputs import Measurement, MetricsLog
from clover_jax.training.run import _report
from clover_jax.training.settings import TrainSettings


class Recorder:
    """Takes the drafts that are written, as (name, step)."""

    def __init__(self):
        self.written = []

    def write(self, name, params, step, measured=None):
        self.written.append((name, step))


def measured(tau, tree="chain:1"):
    return DecodingReport(
        tau=tau,
        hit_rate=[0.5],
        equal=1,
        prompts=1,
        tokens=int(10 * tau),
        forwards=10,
        measured_with={"tree": tree},
    )


def measure(workdir, writer, reports, done=0, best=None):
    """Measure the steps of a run that goes on after `done`; return what is best."""
    with (
        contextlib.closing(MetricsLog(workdir, done)) as log,
        progress_bar(3, "train", file=io.StringIO()) as progress,
    ):
        for step, report in reports.items():
            # The loss falls all the way; nothing asks for it.
            log.write("train", {"step": step, "loss": 1.0 / step})
            evaluator = types.SimpleNamespace(measure=lambda params, stop, report=report: report)
            state = types.SimpleNamespace(params={})
            measurement = Measurement(evaluator, log, writer, progress, threading.Event(), best)
            measurement(step, state)
            best = measurement.best
        return best


def test_the_best_draft_is_the_one_with_the_highest_tau_however_low_a_loss(tmp_path):
    writer = Recorder()
    measure(tmp_path, writer, {1: measured(1.5), 2: measured(2.5), 3: measured(2.0)})
    assert writer.written == [("best", 1), ("draft", 1), ("best", 2), ("draft", 2), ("draft", 3)]


def test_a_tau_is_compared_with_those_of_the_same_prompts_and_tree_only(tmp_path):
    """A run is taken up with a tree that gives lower taus, and then with the first one again."""
    for step in (1, 2):  # rows of a version that did not say what it measured with
        append_row(tmp_path / "eval.jsonl", {"step": step, "tau": 9.0})
    writer = Recorder()
    best = measure(tmp_path, writer, {3: measured(2.5)}, done=2)
    others = {4: measured(1.0, "none"), 5: measured(1.1, "none")}
    best = measure(tmp_path, writer, others, done=3, best=best)
    report = _report(tmp_path, TrainSettings(steps=6), 5, False, best)
    assert (report["best_step"], report["tau"]) == (5, 1.1)
    best = measure(tmp_path, writer, {6: measured(1.5)}, done=5, best=best)
    assert best["step"] == 6
    kept = [step for name, step in writer.written if name == "best"]
    assert kept == [3, 4, 5, 6]
