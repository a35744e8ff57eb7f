import importlib
import re

import pytest

from clover_jax.command_flags import parse_flags
from tests.conftest import REPOSITORY

FLAGFILES = sorted((REPOSITORY / "experiments").glob("*.flags"))


def command_of(flagfile):
    """Return the module that a flagfile's comments say it is for."""
    command = re.search(r"python -m (clover_jax\.\w+) --flagfile=(\S+)", flagfile.read_text())
    assert command, f"{flagfile.name} does not say its command"
    assert command[2] == f"experiments/{flagfile.name}"
    return importlib.import_module(command[1])


@pytest.mark.parametrize("flagfile", FLAGFILES, ids=lambda path: path.name)
def test_every_flagfile_parses(flagfile):
    command = command_of(flagfile)
    flags = parse_flags(command.define_flags, [f"--flagfile={flagfile}"])
    assert flags.flagfile == [str(flagfile)]


@pytest.mark.parametrize("flagfile", FLAGFILES, ids=lambda path: path.name)
def test_every_flagfile_says_what_its_command_needs(flagfile):
    settings = [line for line in flagfile.read_text().splitlines() if line.startswith("--")]
    names = [line.partition("=")[0] for line in settings]
    assert len(names) == len(set(names)), "a flag is given twice"
