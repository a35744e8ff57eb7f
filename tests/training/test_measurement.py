import contextlib
import io
import threading
import types

from clover_jax.progress import progress_bar
from clover_jax.training.evaluation import DecodingReport
from clover_jax.training.metrics import MetricsLog
from clover_jax.training.run import Measurement


class Recorder:
    """Takes the drafts that are written, as (name, step)."""

    def __init__(self):
        self.written = []

    def write(self, name, params, step, measured=None):
        self.written.append((name, step))


def measured(tau):
    return DecodingReport(
        tau=tau, hit_rate=[0.5], equal=1, prompts=1, tokens=int(10 * tau), forwards=10
    )


def test_the_best_draft_is_the_one_with_the_highest_tau_however_low_a_loss(tmp_path):
    taus, writer = {1: 1.5, 2: 2.5, 3: 2.0}, Recorder()
    with (
        contextlib.closing(MetricsLog(tmp_path, 0)) as log,
        progress_bar(3, "train", file=io.StringIO()) as progress,
    ):
        for step, tau in taus.items():
            # The loss falls all the way; nothing asks for it.
            log.write("train", {"step": step, "loss": 1.0 / step})
            evaluator = types.SimpleNamespace(measure=lambda params, stop, tau=tau: measured(tau))
            state = types.SimpleNamespace(params={})
            Measurement(evaluator, log, writer, progress, threading.Event())(step, state)
    assert writer.written == [("best", 1), ("draft", 1), ("best", 2), ("draft", 2), ("draft", 3)]
