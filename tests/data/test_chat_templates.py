"""Conversations and a base without a chat template: `train` and `prepare` say so."""

import json

import pytest

from clover_jax import cli, prepare
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_parts
from tests.tiny_folders import save_tiny_base

NOTICE = "the base has no chat template: messages of 2 conversations are joined by newlines"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": "a", "response": "b c"}] * 2 + [{"text": "the hat"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("template", [None, "vicuna"])
def test_train_says_that_nothing_marks_who_speaks(base, data, capsys, template):
    load_parts(TrainSettings(base=str(base), data=str(data), seq_len=32, chat_template=template))
    assert (NOTICE in capsys.readouterr().err) == (template is None)


def test_prepare_says_it_too(base, data, capsys):
    flags = [f"--base={base}", f"--data={data}", "--seq_len=32", "--preview"]
    assert cli.run(prepare.main, prepare.define_flags, flags) == 0
    assert NOTICE in capsys.readouterr().err
