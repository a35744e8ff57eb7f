"""What every test of the convert command shares."""

import json

import pytest

from clover_jax import cli, convert
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
