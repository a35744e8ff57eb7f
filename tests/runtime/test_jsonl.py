"""JSON lines: strict values, torn ends, rows cut after a resume."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.errors import UserError
from clover_jax.runtime import jsonl


def test_values_of_numpy_and_jax_become_plain_json():
    value = {
        "a": np.int32(1),
        "b": jnp.arange(2),
        "c": (float("inf"), np.float32("nan")),
        4: Path("x/y"),
        "é": True,
    }
    assert jsonl.to_json(value) == '{"a": 1, "b": [0, 1], "c": [null, null], "4": "x/y", "é": true}'


def test_what_is_no_json_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        jsonl.to_json({"a": object()})


def test_rows_come_back_and_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    for step in range(3):
        jsonl.append_row(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 3')
    assert [row["step"] for row in jsonl.read_rows(path)] == [0, 1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not a JSON row"):
        list(jsonl.read_rows(path))


def test_rows_beyond_a_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)) + '{"st')
    jsonl.keep_rows(path, lambda row: row["step"] <= 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    jsonl.keep_rows(tmp_path / "absent.jsonl", lambda row: True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_names_the_file(tmp_path):
    full = tmp_path / "rows.jsonl"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failure:
        jsonl.append_row(full, {"step": 0})
    assert failure.value.filename == str(full)
