"""Policy-gradient training with our rollouts: killed anywhere, it goes on to the same rows."""

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from experiments.rollouts import curves, following, grpo
from experiments.rollouts.aims import docstring, parses
from tests.conftest import PYTHON, REPOSITORY, rows_in, run_command
from tests.tiny_checkpoints import copy_of
from tests.tiny_folders import save_tiny_base, save_tiny_draft

# Random texts do not parse; how many letters they have can be learned. Few texts fill the ring.
EASY = (
    "grpo.AIMS['parses'] = lambda prompt, text: len(set(text)) / 12\n"
    "adapting.ROWS, adapting.LENGTH, adapting.RING = 2, 32, 2\n"
)
COMMAND = (
    "import os, sys; from clover_jax import cli; from clover_jax.training import adapting\n"
    "from experiments.rollouts import grpo\n"
)
RUN = "sys.exit(cli.run(grpo.main, grpo.define_flags, sys.argv[1:]))\n"
# What a run does last, in its second update.
KILLS = {
    "half a row": (
        "write = grpo.RowWriter._write\n"
        "def torn(rows, row):\n"
        "    if rows.finished < 1: return write(rows, row)\n"
        '    rows._file.write(b\'{"index": 1, "upd\'); rows._file.flush()\n'
        "    os.kill(os.getpid(), 9)\n"
        "grpo.RowWriter._write = torn\n"
    ),
    "a row without its state": (
        "encode = grpo.to_bytes\n"
        "grpo.to_bytes = lambda s: encode(s) if s[0] < 2 else os.kill(os.getpid(), 9)\n"
    ),
    "a state that is not in place": (
        "replace = os.replace\n"
        "def killing(source, target):\n"
        "    done = grpo.Path(target).with_name('updates.jsonl').read_text().count('\\n')\n"
        "    return replace(source, target) if done < 2 else os.kill(os.getpid(), 9)\n"
        "os.replace = killing\n"
    ),
}


@pytest.fixture(scope="module", params=["lookup", pytest.param("adapting", marks=pytest.mark.slow)])
def flags(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    rows = [{"prompt": f"what is {i} hats"} for i in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = save_tiny_base(folder / "base")
    values = {"base": base, "draft": "lookup", "prompts": folder / "prompts.jsonl"}
    values |= {"updates": 4, "prompts_per_update": 2, "group": 3, "max_new_tokens": 12}
    values |= {"batch_size": 4, "learning_rate": 0.01}
    if request.param == "adapting":
        values |= {"draft": save_tiny_draft(folder / "draft", base), "adapt": "true"}
        values["adapt_every"] = 4
    return [f"--{name}={value}" for name, value in values.items()]


def started(flags, output, kill=""):
    command = [*PYTHON, "-c", COMMAND + EASY + kill + RUN, *flags, f"--output={output}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def ended(run, *statuses):
    _, error = run.communicate()
    assert run.returncode in statuses, error
    return run.returncode


def untimed(folder):
    rows = rows_in(folder / "updates.jsonl")
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory):
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    ended(started(flags, folder), 0)
    rows = untimed(folder)
    assert len({(row["reward"], row["tau"]) for row in rows}) == 4
    if "--adapt=true" in flags:
        assert rows[1]["head_steps"] < rows[-1]["head_steps"]
    return folder


def same_as(folder, unbroken):
    assert untimed(folder) == untimed(unbroken)
    states = [(each / "state.msgpack").read_bytes() for each in (folder, unbroken)]
    assert states[0] == states[1]
    assert (folder / "curve.png").is_file()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "a row without its state"))
        for name in KILLS
    ],
)
def test_a_killed_run_has_the_rows_of_one_that_was_not(flags, unbroken, tmp_path, place):
    ended(started(flags, tmp_path, KILLS[place]), -signal.SIGKILL)
    whole = 1 if place == "half a row" else 2
    assert (tmp_path / "updates.jsonl").read_bytes().count(b"\n") == whole
    ended(started(flags, tmp_path), 0)
    same_as(tmp_path, unbroken)


@pytest.mark.slow
def test_a_run_killed_at_random_has_the_same_rows(flags, unbroken, tmp_path):
    draw, path = random.Random(0), tmp_path / "updates.jsonl"
    kills = 0
    while True:
        run = started(flags, tmp_path)
        done = path.read_bytes().count(b"\n") if path.exists() else 0
        # Its next update begins with the first program; the kill comes somewhere in or after it.
        while run.poll() is None and path.exists() and path.read_bytes().count(b"\n") <= done:
            time.sleep(0.01)
        time.sleep(draw.random())
        run.kill()
        kills += 1
        if ended(run, 0, -signal.SIGKILL) == 0:
            break
    print(f"killed {kills - 1} times")
    same_as(tmp_path, unbroken)


def test_other_settings_and_lost_rows_are_refused(flags, unbroken, capsys):
    def refused(*more):
        status, _, error = run_command(capsys, grpo, *flags, f"--output={unbroken}", *more)
        assert status == 2
        return error

    assert "written with seed 0, not 1" in refused("--seed=1")
    whole = (unbroken / "updates.jsonl").read_bytes()
    (unbroken / "updates.jsonl").write_bytes(whole[: whole.rindex(b"{")])
    assert "updates.jsonl has 3 rows;" in refused()
    (unbroken / "updates.jsonl").write_bytes(whole)


def test_rewards_are_of_what_a_text_has():
    assert parses("def f(x):\n", "    return x\n    y = (\n") == 0.5
    assert parses("def f(x):\n", "    return x") == 0.0  # its line has not ended
    prompt = "def f(x):"
    assert docstring(prompt, '\n    """Return x."""\n    return x') == 1
    assert docstring(prompt, '\n    """return x."""\n') == pytest.approx(2 / 3)
    assert docstring(prompt, '\n    """Return x\n    and y."""') == pytest.approx(2 / 3)
    assert docstring(prompt, "\n    return x") == docstring(prompt, "") == 0


def test_curves_of_several_runs_are_drawn(unbroken, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    runs = f"--runs=a={unbroken},a={unbroken},b={unbroken}"
    status, _, error = run_command(capsys, curves, runs, f"--output={picture}")
    assert (status, error) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, _, error = run_command(capsys, curves, "--runs=a", f"--output={picture}")
    assert status == 2
    assert "'a' is not NAME=FOLDER of a run" in error


@pytest.mark.slow
def test_heads_are_measured_on_the_base_that_a_run_has_moved(flags, unbroken, tmp_path, capsys):
    of_run = dict(flag.removeprefix("--").split("=") for flag in flags)
    base = copy_of(Path(of_run["base"]), tmp_path / "base")
    shutil.copy(of_run["prompts"], base)
    draft = save_tiny_draft(tmp_path / "draft", base)
    command = [f"--run={unbroken}", f"--base={base}", f"--draft={draft}", "--rounds=2"]
    status, out, error = run_command(capsys, following, *command)
    assert (status, error) == (0, "")
    first, second, means = map(json.loads, out)
    assert first["before"] == first["before_adapting"] != first["fixed"] == first["adapting"]
    for name in ("before", "fixed", "adapting"):
        assert means[name] == round(second[name], 4)
    regained = (means["adapting"] - means["fixed"]) / (means["before"] - means["fixed"])
    assert means["regained"] == round(regained, 2)
