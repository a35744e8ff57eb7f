"""What every test of the convert command shares."""

import json
import os
import subprocess

import pytest

from clover_jax import cli, convert
from tests.conftest import REPOSITORY
from tests.tiny_folders import save_tiny_base, save_tiny_draft
from tests.tiny_tokenizers import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    return fixtures_dir / "clover2_reference"


@pytest.fixture
def command(capsys):
    """Run the command in this process: (status, last line of stdout, stderr)."""

    def run(*argv):
        capsys.readouterr()
        status = cli.run(convert.main, convert.define_flags, [str(a) for a in argv])
        printed = capsys.readouterr()
        last = printed.out.splitlines()[-1] if printed.out else None
        return status, last and json.loads(last), printed.err

    return run


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A base with a tokenizer, and a native draft for it."""
    folder = tmp_path_factory.mktemp("speaking")
    save_tiny_base(folder / "base", template=CHAT_TEMPLATE)
    save_tiny_draft(folder / "head", folder / "base")
    return folder


@pytest.fixture
def ask_worker(tmp_path):
    """A function that runs a file beside this one by another environment's interpreter.

    ask(variable, worker, asked, **settings): the variable names the interpreter. The worker reads
    `asked` as the first line of its stdin, and `go` as the second; what it writes to the file that
    its argument names is returned. settings: of its environment.
    """

    def ask(variable, worker, asked, **settings):
        result = tmp_path / "out.json"
        finished = subprocess.run(
            [os.environ[variable], str(REPOSITORY / "tests/convert" / worker), str(result)],
            input=json.dumps(asked) + "\ngo\n",
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
        return json.loads(result.read_text())

    return ask
