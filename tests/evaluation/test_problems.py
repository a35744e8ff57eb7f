"""Rows that fail, and texts that are not plain decoding's."""

import copy
import json
import shutil

import pytest

from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.evaluation.equality import Divergence, judge
from clover_jax.evaluation.page import report_text
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.report import slow_drafts
from tests.evaluation.command import ROWS, run, write_rows


def test_a_row_that_fails_fails_the_run_and_is_counted(folder):
    # Of the longest row, so that the programs are those of the whole run.
    write_rows(folder, "bad.jsonl", [*ROWS[2:3], {"category": "qa", "promp": "misspelt"}])
    failing = run(folder, folder / "failing", "--repeats=1", prompts="bad.jsonl")
    assert failing.status == 1
    assert failing.result["failed"] == 1
    reason = f"{folder / 'bad.jsonl'}:2: expected one of prompt, question"
    names = ("plain decoding", "chain", "short")
    for name, line in zip(names, failing.result["problems"], strict=True):
        assert line.startswith(f"{name}: 1 of 2 rows failed, the first with: {reason}")
    assert failing.err.count(reason) == 1
    assert f"row 1 failed: {reason}" in failing.err
    cell = failing.report["methods"]["chain"]["overall"]
    assert (cell["rows"], cell["failed"], cell["turns"]) == (2, 1, 1)
    assert cell["equality"]["not_compared"] == 1
    page = (failing.output / "report.md").read_text()
    assert "**Problem: chain: 1 of 2 rows failed, the first with: " in page


def test_another_text_than_plain_decoding_s_fails_the_run(finished, folder):
    output = folder / "tampered"
    shutil.copytree(finished.output, output)
    path = output / "rows" / "chain.jsonl"
    first, *others = finished.rows("chain")
    first["output_ids"][0][4] = (first["output_ids"][0][4] + 7) % 261
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    tampered = run(folder, output, "--batch_sizes=1")
    assert tampered.status == 1
    assert tampered.result["problems"] == [
        "chain: 1 rows differ from plain decoding by more than ties"
    ]
    (found,) = tampered.report["divergences"]["chain"]
    assert (found["index"], found["turn"], found["position"]) == (0, 0, 4)
    assert found["gap"] > found["threshold"]


@pytest.mark.slow
def test_another_text_of_a_later_pass_fails_the_run(finished, folder):
    output = folder / "later"
    shutil.copytree(finished.output, output)
    wrong = finished.rows("chain")[0]
    wrong["output_ids"][0][4] = (wrong["output_ids"][0][4] + 7) % 261
    failed = {"index": 3, "row": 3, "task": "qa", "error": "out of memory"}
    edit_passes(output, {("chain", 1): [wrong], ("short", 2): [failed]})
    later = run(folder, output, "--batch_sizes=1")
    assert later.status == 1
    assert later.result["problems"] == [
        "chain: 1 rows differ from plain decoding by more than ties",
        "short: rows failed in a later pass, 1 in all",
    ]
    assert later.result["equal"] == {"chain": 3, "short": 4}
    (found,) = later.report["divergences"]["chain"]
    assert (found["batch_size"], found["repeat"], found["position"]) == (1, 1, 4)
    page = (output / "report.md").read_text()
    assert "Texts of later passes that differ from the first pass: chain 1, short 1." in page


def edit_passes(output, changed):
    """Give the last pass of (method, batch size) rows that differ from the first pass."""
    passes = [json.loads(line) for line in (output / "legs.jsonl").read_text().splitlines()]
    last = {(one["method"], one["batch_size"]): one for one in passes}
    for key, rows in changed.items():
        last[key]["changed"] = rows
    (output / "legs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in passes))


def test_a_later_pass_is_held_against_the_first(finished, folder):
    output = folder / "again"
    shutil.copytree(finished.output, output)
    first, *others = finished.rows("short")
    first["output_ids"][0][2] = (first["output_ids"][0][2] + 7) % 261
    path = output / "rows" / "short.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    (output / "legs.jsonl").unlink()
    again = run(folder, output)
    assert again.status == 1
    assert again.report["speed"]["2"]["short"]["overall"]["rows_changed"] == 2  # both repeats
    assert again.report["speed"]["2"]["chain"]["overall"]["rows_changed"] == 0


def test_sampled_text_is_that_of_plain_sampling(stopped):
    assert stopped.status == 0, stopped.err
    assert stopped.result["equal"] == {"chain": 4, "short": 4}
    assert stopped.report["is_equality_expected"]


def test_rows_of_training_data_are_decoded_from_their_prompts(folder):
    asked = {"role": "user", "content": "the hat"}
    answered = {"messages": [asked, {"role": "assistant", "content": "x"}]}
    write_rows(folder, "chats.jsonl", [answered, {"messages": [asked]}])
    write_rows(folder, "wrong.jsonl", [{"prompt": 1}, {"prompt": 2}])
    few = ("--drafts=", "--tree=none", "--repeats=1")
    chats = run(folder, folder / "chats", *few, prompts="chats.jsonl")
    assert chats.status == 0, chats.err
    assert "chats.jsonl: 1 of 2 rows end with an assistant message" in chats.err
    first, second = chats.rows("vanilla")
    assert first["output_ids"] == second["output_ids"]

    both = f"--prompts={folder / 'wrong.jsonl'},{folder / 'chats.jsonl'}"
    mixed = run(folder, folder / "mixed", *few, both)
    assert mixed.report["tasks"] == ["wrong", "chats"]
    assert mixed.result["failed"] == 2
    assert "row 0 failed: " in mixed.err
    assert "row 1 failed" not in mixed.err
    assert "2 rows failed for the same reason as row 0" in mixed.err


def test_a_draft_that_is_slower_says_why(finished):
    report = copy.deepcopy(finished.report)
    report["methods"]["chain"]["overall"]["tau"] = 2.0
    report["methods"]["chain"]["step"]["break_even_tau"] = 18.29
    report["speed"]["2"]["chain"]["overall"]["speedup"]["median"] = 0.18
    report["speed"]["2"]["short"]["overall"]["speedup"]["median"] = 1.2
    (line,) = report["slow_drafts"] = slow_drafts(report)
    assert line.startswith("chain: 0.18x is slower than plain decoding, because one step costs as ")
    assert "18.29 steps of plain decoding (break-even tau) and emits 2.00 tokens (tau)" in line
    assert line.endswith("try a smaller tree, --tree=auto or a larger base")
    assert line in report_text(report, [])


@pytest.mark.parametrize(
    "sampling", [SamplingConfig("typical"), SamplingConfig("lossless", "sampled")]
)
def test_where_no_equality_is_expected_no_difference_is_judged(sampling):
    settings = GenerationSettings()
    plan = Plan({}, settings, sampling, seed=0, repeats=1, batch_sizes=[2], longest=9)
    comparisons = {3: [Divergence(3, 0, 1, 5, 6)], 4: [None]}
    # Without a base: nothing is decoded again.
    found = judge(comparisons, {}, plan, vanilla=None)
    assert found == {3: Divergence(3, 0, 1, 5, 6)}
    assert not plan.is_equality_expected
