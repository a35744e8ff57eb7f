"""Mistakes in a command line of `evaluate`."""

import pytest

from clover_jax import cli, evaluate


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare=a"], "--compare=a: give two reports, A,B"),
        (["--compare=/nowhere/a.json,b"], "/nowhere/a.json cannot be read"),
        (["--drafts=x="], "'x=' should be NAME=DIR, or DIR"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["--mesh=data=2"], "--mesh=data=2 asks for 2 devices, but 1 is here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, said, capsys):
    assert cli.run(evaluate.main, evaluate.define_flags, argv) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
