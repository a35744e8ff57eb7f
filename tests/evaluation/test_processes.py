"""Real processes that measure as one: rows and figures are those of one, whoever is killed."""

import json

import pytest

from clover_jax.evaluation.plan import JOURNAL
from tests.decoding.test_rows import ragged_rows, rows_of
from tests.evaluation.conftest import ROWS, write_rows
from tests.killed_processes import lines_in, run_through_kills, start

METHODS = ("vanilla", "chain")


@pytest.fixture
def evaluate(folder, tmp_path):
    """A function that gives the command of measuring a draft on the same prompts into a folder."""
    rows = [*ROWS, {"category": "qa", "prompt": "bad", "temperature": -1}, *ragged_rows(6)]
    prompts = write_rows(tmp_path, "prompts.jsonl", rows)
    flags = ["evaluate", f"--base={folder / 'base'}", f"--drafts=chain={folder / 'work'}"]
    flags += [f"--prompts={prompts}", "--baselines=none", "--context_overflow=truncate_left"]
    flags += ["--batch_size=4", "--max_new_tokens=9", "--repeats=3"]
    return lambda output, *argv: (*flags, f"--output={tmp_path / output}", *argv)


@pytest.mark.slow
@pytest.mark.parametrize("count, kills", [(2, 10), (4, 10)])
def test_processes_give_the_rows_and_figures_of_one(evaluate, tmp_path, count, kills):
    alone = start(1, *evaluate("one"))
    _, errors = alone.communicate()
    assert alone.returncode == 1, errors  # the bad row
    one, ours = tmp_path / "one", tmp_path / "ours"

    # Rows of every method, and a line for each pass over a task.
    names = [f"rows/{method}.jsonl" for method in METHODS]
    total = sum(len(rows_of(one / name)) for name in [*names, JOURNAL])
    done = lines_in(*(ours / name for name in [*names, JOURNAL]))
    status, said, errors = run_through_kills(kills, done, total, count, *evaluate("ours"))
    assert status == 1, errors
    assert kills == 0 or "timed rows are there already" in errors

    for name in names:
        assert rows_of(ours / name) == rows_of(one / name)
    figures, of_one = (json.loads((path / "report.json").read_text()) for path in (ours, one))
    for method in METHODS:
        for key in ("overall", "tasks"):
            assert figures["methods"][method][key] == of_one["methods"][method][key]
    assert figures["methods"]["chain"]["step"]["verify"] > 0
    assert len(figures["sessions"]) <= kills + 1
    for key in ("tasks", "batch_sizes", "divergences", "problems"):
        assert figures[key] == of_one[key]
    assert figures["manifest"]["base"] == of_one["manifest"]["base"]
    assert said.count('"problems"') == 1  # one process speaks


@pytest.mark.slow
def test_several_processes_choose_no_tree(evaluate):
    run = start(2, *evaluate("out", "--tree=auto"))
    _, said = run.communicate()
    assert run.returncode == 2, said
    assert "measures in one process, not in 2" in said
