"""What the tests of the command `prepare` share: a base, texts, and a folder made of them."""

import json

import numpy as np
import pytest

from clover_jax import cli, prepare
from tests.prepare.prepared_data import FLAGS
from tests.tiny_folders import save_tiny_base
from tests.tiny_tokenizers import CHAT_TEMPLATE


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base", template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = np.random.default_rng(0)
    words = ["the", "hat", "he", "had", "it", "be", "a"]
    with path.open("w") as file:
        for _ in range(60):
            said = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 4, 2)]
            file.write(json.dumps({"prompt": said[0], "response": said[1]}) + "\n")
        file.write(json.dumps({"text": "he had the hat " * 12}) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared(base, data, tmp_path_factory):
    """A folder with float32 activations for Clover-2."""
    output = tmp_path_factory.mktemp("prepared") / "out"
    flags = {"base": base, "data": data, "output": output} | FLAGS
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    assert cli.run(prepare.main, prepare.define_flags, arguments) == 0
    return output


@pytest.fixture
def command(capsys):
    """Run the command in this process: (status, stdout, stderr)."""

    def run(*flags, **values):
        arguments = [*flags, *(f"--{name}={value}" for name, value in values.items())]
        status = cli.run(prepare.main, prepare.define_flags, arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
