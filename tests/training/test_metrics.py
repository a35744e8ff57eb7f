import json

import pytest

from clover_jax.training.outputs import MetricsLog


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
    scalars = {
        value.tag: value.simple_value
        for event in events_of(file)
        for value in event.summary.value
        if event.step == 2
    }
    assert scalars == {
        "train/loss": 1.5,
        "train/accuracy/0": 0.5,
        "train/accuracy/1": 0.25,
        "eval/tau": 2.0,
    }


def test_rows_after_the_step_of_a_resume_are_cut(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write("train", {"step": step, "loss": 0.0})
    log.close()
    MetricsLog(tmp_path, 2).close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
