"""Real processes that decode as one: the rows are those of one, whoever is killed meanwhile."""

import json
import re

import pytest

from tests.conftest import PYTHON, run_program
from tests.decoding.test_rows import ragged_rows, rows_of
from tests.killed_processes import LAUNCH, lines_in, run_through_kills, start


@pytest.fixture
def generate(base, draft, prompts_file, tmp_path):
    """A function that gives the command of decoding the same prompts into a file."""
    rows = [*ragged_rows(6), {"prompt": "bad", "temperature": -1}, {"turns": ["hello", "why"]}]
    rows += [{"prompt": "stop", "stop": ["e"]}, *ragged_rows(6)]
    flags = ["generate", f"--base={base}", f"--draft={draft}", f"--prompts={prompts_file(*rows)}"]
    flags += ["--batch_size=4", "--max_new_tokens=30", "--temperature=0.8", "--seed=3"]
    return lambda output, *argv: (*flags, f"--output={tmp_path / output}", *argv)


def test_what_the_primary_alone_finds_wrong_every_process_says():
    run = start(2, "generate", "--prompts=/nowhere.jsonl")
    _, said = run.communicate()
    assert run.returncode == 2, said
    assert said.count("clover_jax.generate: /nowhere.jsonl: No such file") == 2


@pytest.mark.slow
def test_several_processes_measure_no_tree(generate):
    run = start(2, *generate("out.jsonl", "--tree=auto"))
    _, said = run.communicate()
    assert run.returncode == 2, said
    assert "--tree=auto measures in one process, not in 2" in said


@pytest.mark.slow
@pytest.mark.parametrize("count, kills", [(2, 10), (4, 10)])
def test_processes_that_are_killed_at_random_write_the_rows_of_one(
    generate, tmp_path, count, kills
):
    alone = start(1, *generate("one.jsonl"))
    said, errors = alone.communicate()
    assert alone.returncode == 1, errors  # the bad row
    rows, output = rows_of(tmp_path / "one.jsonl"), tmp_path / "out.jsonl"
    status, said_last, errors = run_through_kills(
        kills, lines_in(output), len(rows), count, *generate("out.jsonl")
    )
    assert status == 1, errors
    assert "rows are in" in errors
    assert rows_of(output) == rows

    # One process speaks, and of all rows.
    (report,) = re.findall(r'{"tau".*', said_last)
    assert json.loads(report)["tokens"] == json.loads(re.search(r'{"tau".*', said)[0])["tokens"]


# One process fails while the other waits for it in a step.
FAILS_ALONE = """
import sys
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
from clover_jax.runtime.distributed import joined_processes

with joined_processes():
    process_allgather(np.zeros(1))
    if jax.process_index() == int(sys.argv[1]):
        raise OSError("no space left here")
    process_allgather(np.zeros(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_alone_does_not_wait_for_the_others(failing):
    program = *PYTHON, "-c", FAILS_ALONE, str(failing)
    finished = run_program(LAUNCH, "2", *program, status=None, GRACE="60")
    assert finished.returncode in (1, 3), finished.stderr
    assert "OSError: no space left here" in finished.stderr
    assert f"process {1 - failing}: another process of this run has ended" in finished.stderr
