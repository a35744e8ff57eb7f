"""The command wrapper: statuses, one-line mistakes, flagfiles, help without devices."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags as absl_flags

import clover_jax
from clover_jax import cli, train
from clover_jax.errors import UserError

PACKAGE = Path(clover_jax.__file__).parent
# A command module is one whose last lines hand itself to the wrapper.
COMMANDS = sorted(
    path.stem
    for path in PACKAGE.glob("*.py")
    if path.stem != "cli" and "sys.exit(cli.run(main, define_flags))" in path.read_text()
)


def define_flags(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string("prompt", None, "what to continue", flag_values=flags)
    absl_flags.DEFINE_bool("ignore_eos", False, "go on after EOS", flag_values=flags)
    absl_flags.DEFINE_float("temperature", 0.0, "heat", lower_bound=0, flag_values=flags)
    cli.define_common_flags(flags)


def run(main, *argv):
    main.__module__ = __name__
    return cli.run(main, define_flags, argv)


def ignore(flags):
    """Do nothing with the flags."""


def fail(error):
    def main(flags):
        raise error

    return main


def test_status_is_main_s_own_and_zero_for_none():
    assert run(lambda flags: None) == 0
    assert run(lambda flags: 1) == 1


def test_flags_reach_main_with_their_defaults():
    def main(flags):
        assert (flags.prompt, flags.base, flags.temperature) == ("a b", "builtin:tiny", 0.5)
        assert (flags.dtype, flags.seed, flags.ignore_eos) == ("auto", 0, True)

    assert run(main, "--prompt=a b", "--temperature", "0.5", "--ignore_eos") == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--temprature=1"], "Unknown command line flag 'temprature'. Did you mean: temperature"),
        (["--temperature=-1"], "--temperature=-1: -1.0 is not a non-negative number"),
        (["--temperature=warm"], "could not convert string to float"),
        (["--dtype=int8"], "auto|float32|bfloat16"),
        (["--prompt"], "Missing value for flag --prompt"),
        (["hello", "--seed=1"], "unexpected argument 'hello'"),
        (["--flagfile=/nowhere.flags"], "Unable to open flagfile: [Errno 2] No such file"),
        (["--flagfile"], "no argument"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(argv, said, capsys):
    assert run(ignore, *argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("num_heads (30) must be\ndivisible by 8"), "num_heads (30) must be divisible"),
        (FileNotFoundError(2, "No such file or directory", "x.jsonl"), "x.jsonl: No such file"),
        (OSError(28, "No space left on device"), "free some space"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_status_2(error, said, capsys):
    assert run(fail(error)) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("deep"), OSError("odd"), KeyError("k")])
def test_a_bug_keeps_its_traceback_and_says_that_it_is_one(error):
    with pytest.raises(type(error), match=str(error)) as raised:
        run(fail(error))
    assert "this is a bug" in raised.value.__notes__[0]


def test_interrupting_is_one_line_and_status_130(capsys):
    assert run(fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.endswith(": interrupted\n")


def test_a_reader_that_goes_away_ends_a_command_quietly():
    source = "import sys; from tests.cli import test_command; sys.exit(test_command.print_much())"
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=PACKAGE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def print_much() -> int:
    def main(flags):
        for _ in range(100_000):
            print("y" * 80)

    return run(main)


def test_flagfiles_are_read_and_later_flags_win(tmp_path):
    (tmp_path / "inner.flags").write_text("--seed=5\n")
    (tmp_path / "outer.flags").write_text(
        f"# why\n--prompt=two words\n\n--temperature=2\n--flagfile={tmp_path}/inner.flags\n"
    )

    def main(flags):
        assert (flags.prompt, flags.temperature, flags.seed) == ("two words", 3.0, 5)
        assert cli.workdir_of(flags, "train") == Path("runs/outer")

    assert run(main, f"--flagfile={tmp_path}/outer.flags", "--temperature=3") == 0


@pytest.mark.parametrize(
    ("argv", "workdir"),
    [
        ([], "runs/train"),
        (["--flagfile=a.flags", "--flagfile", "b.flags"], "runs/a+b"),
        (["--flagfile=a.flags", "--workdir=elsewhere"], "elsewhere"),
    ],
)
def test_default_workdir_is_named_after_the_flagfiles(argv, workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.flags", "b.flags"):
        Path(name).touch()

    def main(flags):
        assert cli.workdir_of(flags, "train") == Path(workdir)

    assert run(main, *argv) == 0


def test_a_common_flag_without_effect_is_named_where_it_is_given(capsys, tmp_path):
    flagfile = tmp_path / "a.flags"
    flagfile.write_text("--seed=3\n")
    for given, told in ((f"--flagfile={flagfile}", True), ("--mesh=data=1", False)):
        cli.run(ignore, lambda flags: cli.define_common_flags(flags, "seed"), [given])
        assert ("--seed has no effect here" in capsys.readouterr().err) == told


def test_settings_leave_out_what_is_asked():
    def main(flags):
        settings = cli.flag_settings(flags, "prompt", "workdir")
        assert settings == {
            "base": "builtin:tiny",
            "dtype": "auto",
            "ignore_eos": False,
            "mesh": None,
            "seed": 7,
            "temperature": 0.0,
        }

    assert run(main, "--seed=7") == 0


def test_report_is_one_line_of_strict_json(capsys):
    cli.report({"tau": np.float32(2.5), "ids": np.arange(2), "loss": float("nan"), "at": Path("x")})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"tau": 2.5, "ids": [0, 1], "loss": None, "at": "x"}


def test_help_shows_own_and_common_flags_and_no_others(capsys):
    assert run(fail(AssertionError), "--prompt=x", "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m ")
    assert __doc__ in shown
    assert "  --prompt=TEXT\n    what to continue\n" in shown
    assert "  --[no]ignore_eos\n    go on after EOS [false]\n" in shown
    assert shown.index("--temperature=X") < shown.index("common flags:") < shown.index("--base=")
    assert shown.count("\n  --") == 3 + 6


def test_help_leaves_rare_groups_to_help_all(capsys):
    for argument in ("--help", "--help=all"):
        assert cli.run(train.main, train.define_flags, [argument]) == 0
    short, whole = capsys.readouterr().out.split("usage: python -m ")[1:]
    groups = re.findall(r"^([a-z ]+):$", whole, re.MULTILINE)
    assert {"data", "optimizer", "loss", "measuring", "memory", "common flags"} <= {*groups}
    assert "--[no]remat" in whole
    assert "--[no]remat" not in short
    assert "more: --help=all" in short


@pytest.fixture(params=["heard"])
def ctrl_c(request):
    """Let Ctrl-C be heard or ignored, however the tests were started."""
    handlers = {"heard": signal.default_int_handler, "ignored": signal.SIG_IGN}
    before = signal.signal(signal.SIGINT, handlers[request.param])
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_becomes_an_event_and_only_inside(number):
    before = signal.getsignal(number)
    with cli.stop_signals_as_event() as requested:
        assert not requested.is_set()
        signal.raise_signal(number)
        assert requested.wait(timeout=60)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_interrupts(capfd):
    with cli.stop_signals_as_event() as requested, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert requested.is_set()
        assert capfd.readouterr().err == "\nstopping after this step; Ctrl-C again stops at once\n"
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
def test_an_import_that_ctrl_c_breaks_is_no_bug(capsys):
    def main(flags):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    assert run(main) == cli.STATUS_INTERRUPTED
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("ctrl_c", ["ignored"], indirect=True)
def test_ctrl_c_stays_ignored_where_it_is():
    with cli.stop_signals_as_event() as requested:
        signal.raise_signal(signal.SIGINT)
        assert not requested.is_set()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_answers_without_jax(command, run_python):
    source = f"""
import runpy, sys
sys.argv = ["{command}", "--help"]
try:
    runpy.run_module("clover_jax.{command}", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {{"jax", "flax", "numpy", "transformers", "grain", "orbax"}} & set(sys.modules)
assert not heavy, heavy
"""
    assert f"usage: python -m clover_jax.{command}" in run_python(source)
