"""`python -m clover_jax`: the list of commands, and each of them."""

import pytest

from clover_jax import __main__, __version__
from tests.cli.test_command import COMMANDS


def test_every_command_is_listed():
    assert sorted(__main__.COMMANDS) == COMMANDS


def test_without_a_command_they_are_listed(capsys):
    assert __main__.main([]) == 0
    printed = capsys.readouterr().out
    assert "  train     Train a draft head for a frozen base by distillation.\n" in printed


@pytest.mark.parametrize("argv", [["--version"], ["generate", "--version"]])
def test_the_version_is_printed(argv, capsys):
    assert __main__.main(argv) == 0
    assert capsys.readouterr().out == f"clover-jax {__version__}\n"


def test_a_command_s_flags_reach_it(capsys):
    assert __main__.main(["generate", "--temprature=1"]) == 2
    assert "Did you mean: temperature" in capsys.readouterr().err


def test_an_unknown_command_is_one_line_and_status_2(capsys):
    assert __main__.main(["chat"]) == 2
    assert "clover-jax: 'chat' is not a command; use one of train" in capsys.readouterr().err
