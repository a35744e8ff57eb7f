"""Several real processes as one run, over loopback, started by launch/local_processes."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.conftest import PYTHON, devices_flag, run_program
from tests.killed_processes import LAUNCH
from tests.training.conftest import BASE, counting_rows, losses_of


@pytest.fixture
def train(tmp_path):
    """A function that gives the command of a small run in a workdir."""
    small = {"batch_size": 4, "seq_len": 32, "warmup_steps": 2, "log_every": 1}
    small |= {"num_positions": 2, "num_augmenting_layers": 1}
    small |= {"base": BASE, "data": counting_rows(tmp_path)}

    def command(workdir, **changes):
        flags = small | {"workdir": tmp_path / workdir} | changes
        flags = [f"--{name}={value}" for name, value in flags.items()]
        return [*PYTHON, "-m", "clover_jax.train", *flags]

    return command


@pytest.fixture
def prepared(tmp_path):
    """A function that prepares the data of `train`, activations included, and returns the flags."""

    def prepare():
        flags = {"base": BASE, "data": tmp_path / "rows.jsonl", "output": tmp_path / "prepared"}
        flags |= {"seq_len": 32, "features": "clover2", "feature_dtype": "float32"}
        flags = [f"--{name}={value}" for name, value in flags.items()]
        run_program(*PYTHON, "-m", "clover_jax.prepare", *flags, **devices_flag(1))
        return {"data": tmp_path / "prepared", "teacher": "cached"}

    return prepare


@pytest.mark.parametrize("teacher", ["online", pytest.param("cached", marks=pytest.mark.slow)])
def test_two_processes_train_as_one_does_with_their_devices(train, prepared, tmp_path, teacher):
    changes = prepared() if teacher == "cached" else {}
    two = train("two", steps=3, **changes)
    said = run_program(LAUNCH, "2", *two, **devices_flag(1)).stdout
    one = train("one", steps=3, mesh="data=2", **changes)
    alone = run_program(*one, **devices_flag(2)).stdout
    assert json.loads(said.splitlines()[-1])["finished"]
    # One of the two processes speaks. (Gloo's own lines, on the same stdout, may come in pieces.)
    for words in ("trained 3 steps", '"finished": true'):
        assert said.count(words) == alone.count(words) == 1
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-6)
    assert (tmp_path / "two" / "draft" / "draft.json").exists()


# Process 0 prints the rows of a batch that is split over two processes, run as accelerators do.
DECODED = """
import json
from clover_jax.runtime.distributed import is_primary, joined_processes

with joined_processes():
    from clover_jax.decoding import programs
    from clover_jax.decoding.engine import Engine
    from clover_jax.decoding.requests import Request
    from clover_jax.decoding.tree_config import parse_tree
    from clover_jax.models.meshes import make_mesh, parse_mesh
    from tests.tiny_models import TINY, random_base, random_head, random_prompts

    programs.loops_on_device = lambda: False
    mesh, (head, params) = make_mesh(parse_mesh("data=2", 2)), random_head()
    engine = Engine(TINY, head, parse_tree("chain:2"), batch_size=2, mesh=mesh)
    requests = [Request(i, p, 5 + 7 * i) for i, p in enumerate(random_prompts(3, seed=6))]
    rows = [p.row for p in engine.stream(random_base(), params, requests) if p.done]
    if is_primary():
        print(json.dumps([row.output_ids for row in sorted(rows, key=lambda row: row.index)]))
"""


@pytest.mark.slow
def test_two_processes_decode_as_one_does(run_python):
    said = run_program(LAUNCH, "2", *PYTHON, "-c", DECODED, **devices_flag(1)).stdout
    alone = run_python(DECODED.replace("lambda: False", "lambda: True"), devices=2)
    # Gloo's own lines are on the same stdout.
    assert json.loads(re.search(r"\[\[.*\]\]", said)[0]) == json.loads(alone)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_a_restart_goes_on(train, tmp_path):
    flags, pipe = {"steps": 400, "checkpoint_every": 2}, subprocess.PIPE
    patient = {**os.environ, "GRACE": "300"}  # a busy machine takes its time to notice
    command = [LAUNCH, "2", *train("w", **flags)]
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=patient)
    second = int(re.search(r"process ids \d+ (\d+)", run.stderr.readline())[1])
    wait_for((tmp_path / "w" / "checkpoints" / "4").exists, run)
    os.kill(second, signal.SIGKILL)
    said = run.communicate()[1]
    assert run.returncode == 128 + signal.SIGKILL
    assert "local_processes: process 1 was killed by signal 9; the others end too." in said
    assert "process 0: another process of this run has ended" in said
    reached = len(losses_of(tmp_path / "w"))
    last = reached + 4
    again = run_program(LAUNCH, "2", *train("w", **flags | {"steps": last}))
    assert "from step" in again.stderr
    assert len(losses_of(tmp_path / "w")) == last


@pytest.mark.parametrize("arguments", [[], ["2"], ["zero", "true"], ["0", "true"]])
def test_the_launcher_says_how_it_is_used(arguments):
    assert run_program(LAUNCH, *arguments, status=2).stderr.startswith("usage: ")


def test_the_launcher_ends_all_when_one_fails():
    script = '[ "$JAX_PROCESS_ID" = 1 ] && exit 7; exec sleep 600'
    finished = run_program(LAUNCH, "3", "bash", "-c", script, status=7, GRACE="0")
    assert "process 1 ended with status 7; the others end too." in finished.stderr


def test_the_launcher_names_the_process_that_was_killed_and_not_one_that_lost_it(tmp_path):
    # Process 0 reads until process 1 is gone, and ends as one that has lost another.
    os.mkfifo(tmp_path / "pipe")
    script = '[ "$JAX_PROCESS_ID" = 1 ] && exec 3> pipe && kill -9 $$; cat pipe; exit 3'
    killed = 128 + signal.SIGKILL
    finished = run_program(LAUNCH, "2", "bash", "-c", script, cwd=tmp_path, status=killed)
    assert "process 1 was killed by signal 9; the others end too." in finished.stderr


def test_the_launcher_waits_for_processes_that_it_was_told_to_stop():
    script = 'trap "echo saved; exit 0" TERM; echo up; while true; do sleep 0.05; done'
    command, pipe = [LAUNCH, "2", "bash", "-c", script], subprocess.PIPE
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert [run.stdout.readline(), run.stdout.readline()] == ["up\n", "up\n"]
    run.terminate()
    said, errors = run.communicate()
    assert (run.returncode, said) == (0, "saved\nsaved\n"), errors


def test_a_launcher_that_is_told_to_end_while_it_starts_tells_all():
    # The first process tells it while the last ones are not there yet.
    script = (
        "[ $JAX_PROCESS_ID = 0 ] && kill -TERM $PPID; "
        "for second in $(seq 60); do sleep 1; done; echo never told"
    )
    terminated = 128 + signal.SIGTERM
    run = run_program(LAUNCH, "40", "bash", "-c", script, status=terminated, GRACE="90")
    assert run.stdout == "", run.stderr


def test_a_mistake_whose_text_speaks_of_connections_is_no_lost_process():
    source = (
        "from clover_jax.runtime.distributed import joined_processes\n"
        "from clover_jax.errors import UserError\n"
        "with joined_processes():\n"
        "    raise UserError('the hub cannot be reached (Connection reset by peer)')\n"
    )
    # Status 1 is that of a traceback: no command reports it here.
    finished = run_program(LAUNCH, "1", *PYTHON, "-c", source, status=1)
    assert "UserError: the hub cannot be reached (Connection reset by peer)" in finished.stderr
    assert "another process of this run has ended" not in finished.stderr


@pytest.mark.parametrize(
    "variables, message",
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"},
            "also needs JAX_PROCESS_ID, a whole number, not ''",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "auto"}, "no cluster was recognized"),
    ],
    ids=["incomplete", "no cluster"],
)
def test_an_environment_that_names_no_processes_is_a_clear_error(train, variables, message):
    assert message in run_program(*train("w"), status=2, **variables).stderr


def test_a_process_that_is_killed_before_the_last_has_started_ends_the_others():
    command = "[ $JAX_PROCESS_ID = 0 ] && kill -9 $$; exec sleep 60"
    run = run_program(LAUNCH, "20", "sh", "-c", command, status=128 + 9, GRACE="0")
    assert "process 0 was killed by signal 9; the others end too." in run.stderr
