"""Mistakes in a command line of `prepare`, and files too large for the disk."""

import dataclasses

import pytest

from clover_jax import prepare
from clover_jax.cli.command_flags import parse_flags
from clover_jax.errors import UserError
from clover_jax.training import features
from clover_jax.training.settings import PrepareOptions
from tests.prepare.prepared_data import SEQ_LEN


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"features": "clover9"}, "'clover9' is neither a drafter"),
        ({"features": "layer_2"}, "layer_0 to layer_1"),
        ({"seq_len": 4096}, "--seq_len=4096 is longer than the base's context, 128"),
        ({"seq_len": 8, "max_truncated": 0.05}, "would be truncated"),
        ({"data": "/missing.jsonl"}, "no such file"),
        ({"draft": "x"}, "--draft is for --regenerate"),
        ({"mesh": "data=2"}, "--mesh=data=2 is for --regenerate and --features"),
        ({"chat_template": "alpaca"}, "no such file, and none of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_status_2(command, base, data, tmp_path, changes, message):
    flags = {"base": base, "data": data, "output": tmp_path / "out", "seq_len": SEQ_LEN}
    status, out, err = command(**(flags | changes))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("out/*.array_record"))


def test_every_option_has_a_flag():
    flags = parse_flags(prepare.define_flags, [])
    names = {field.name for field in dataclasses.fields(PrepareOptions)}
    assert names - {"spec", "warping"} <= set(flags)


@pytest.mark.parametrize(
    "free, yes, message", [(1e12, False, "add --yes"), (1e9, True, "too small")]
)
def test_large_files_need_consent_and_a_disk(monkeypatch, tmp_path, capsys, free, yes, message):
    monkeypatch.setattr(
        features.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})
    )
    options = type("Options", (), {"directory": tmp_path, "yes": yes})
    with pytest.raises(UserError, match=message):
        features._agree_to_size(20_000_000_000, 0, options)
    assert "20.0 GB for activations" in capsys.readouterr().err
