"""What a run logs and measures, and which head is the best."""

import contextlib
import io
import json
import threading
import types

import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.data.records import TokenRow
from clover_jax.errors import UserError
from clover_jax.runtime.jsonl import append_row
from clover_jax.runtime.progress import progress_bar
from clover_jax.training.decoding_eval import evaluation_prompts
from clover_jax.training.outputs import Measurement, MetricsLog
from clover_jax.training.run import _report
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_inputs
from tests.conftest import rows_in
from tests.training.conftest import BASE as BASE_FOLDER

BASE = str(BASE_FOLDER)


@pytest.fixture
def events_of():
    from tensorboardX.proto.event_pb2 import Event

    def read(path):
        data, events = path.read_bytes(), []
        while data:
            size = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
        return events

    return read


def test_rows_go_to_jsonl_and_tensorboard(tmp_path, events_of):
    log = MetricsLog(tmp_path, 0)
    log.write("train", {"step": 2, "loss": 1.5, "accuracy": [0.5, 0.25], "note": "x"})
    log.write("eval", {"step": 2, "tau": 2.0})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.5
    assert log.evaluated_at(2) == {"step": 2, "tau": 2.0}
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [v for event in events_of(file) if event.step == 2 for v in event.summary.value]
    scalars = {"train/loss": 1.5, "train/accuracy/0": 0.5, "train/accuracy/1": 0.25}
    assert {v.tag: v.simple_value for v in values} == scalars | {"eval/tau": 2.0}


def test_rows_after_the_step_of_a_resume_are_cut(tmp_path):
    with contextlib.closing(MetricsLog(tmp_path, 0)) as log:
        for step in (1, 2, 3):
            log.write("train", {"step": step, "loss": 0.0})
    MetricsLog(tmp_path, 2).close()
    assert [row["step"] for row in rows_in(tmp_path / "metrics.jsonl")] == [1, 2]


class Recorder:
    """Takes the drafts that are written, as (name, step)."""

    def __init__(self):
        self.written = []

    def write(self, name, params, step, measured=None):
        self.written.append((name, step))


def measured(tau, tree="chain:1"):
    counts = {"hit_rate": [0.5], "equal": 1, "prompts": 1, "tokens": int(10 * tau), "forwards": 10}
    return {"tau": tau, **counts, "measured_with": {"tree": tree}}


def measure(workdir, writer, reports, done=0, best=None):
    """Measure the steps of a run that goes on after `done`; return what is best."""
    bar = progress_bar(3, "train", file=io.StringIO())
    with contextlib.closing(MetricsLog(workdir, done)) as log, bar as progress:
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
    kept = types.SimpleNamespace(evaluator=None, best=best)
    report = _report(tmp_path, TrainSettings(steps=6), 5, kept)
    assert (report["best_step"], report["tau"]) == (5, 1.1)
    best = measure(tmp_path, writer, {6: measured(1.5)}, done=5, best=best)
    assert best["step"] == 6
    kept = [step for name, step in writer.written if name == "best"]
    assert kept == [3, 4, 5, 6]


@pytest.fixture(scope="module")
def base():
    return load_base(BASE)


def test_prompts_of_held_out_rows_are_decoded_each_once(base, capsys):
    rows = [TokenRow("f", tuple(range(10)), (answer,)) for answer in range(5)]
    rows.append(TokenRow("f", tuple(range(9, 0, -1)), (3,)))
    prompts = evaluation_prompts(None, rows, base, None, 2)
    assert prompts == [list(range(10)), list(range(9, 0, -1))]
    # A row that starts with its answer gives its first half.
    row = TokenRow("f", (1,), tuple(range(20, 33)))
    assert evaluation_prompts(None, [row], base, None, 4) == [[1, *range(20, 26)]]
    # A record that cannot be read is left out.
    rows = [TokenRow("f:1", (10**6,), (1,)), TokenRow("f:2", tuple(range(10)), (20, 21))]
    assert evaluation_prompts(None, rows, base, None, 4) == [list(range(10))]
    assert "left out a sample: f:1: token id 1000000 is outside" in capsys.readouterr().err


def test_a_prompts_file_takes_precedence_and_no_prompt_at_all_is_refused(base, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [i, 2]}) + "\n" for i in range(5)))
    assert evaluation_prompts(str(path), [], base, None, 3) == [[0, 2], [1, 2], [2, 2]]
    with pytest.raises(UserError, match="pass --eval_prompts=FILE, or --eval_every=0"):
        evaluation_prompts(None, [], base, None, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "tau will not be measured: the held-out part of --data has no prompt"),
        (60, "only 3 held-out prompts fit (16 wanted); pass --eval_prompts"),
    ],
)
def test_a_run_says_on_how_few_held_out_prompts_it_is_measured(tmp_path, capsys, rows, message):
    """Data of the default settings: too little of it is no reason not to train."""
    path = tmp_path / "rows.jsonl"
    ids = [{"prompt_ids": [*range(i, i + 9)], "output_ids": [1, 2, 3]} for i in range(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in ids))
    inputs = load_inputs(TrainSettings(base=BASE, data=str(path), seq_len=32))
    assert message in capsys.readouterr().err
    assert (inputs.evaluator is None) == (rows == 3)
    # Prompts that the user named must fit.
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt_ids": [1] * 10_000}))
    with pytest.raises(UserError, match=f"{long} has no prompt of 1 to"):
        load_inputs(TrainSettings(base=BASE, data=str(path), seq_len=32, eval_prompts=str(long)))
