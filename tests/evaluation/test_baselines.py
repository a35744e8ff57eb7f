"""What drafts without training stands in every report."""

import pytest

from tests.evaluation.command import run, write_rows


@pytest.fixture(scope="module")
def copying(folder):
    """A run with nothing but the baseline of lookup."""
    rows = [{"category": "qa", "turns": ["he", "he"]}, {"category": "rag", "prompt": "a b a b"}]
    write_rows(folder, "few.jsonl", rows)
    few = ("--drafts=", "--tree=none", "--baselines=lookup", "--repeats=1", "--max_new_tokens=24")
    return run(folder, folder / "copying", *few, prompts="few.jsonl")


def test_a_baseline_is_measured_as_a_draft_is(copying):
    assert copying.status == 0, copying.err
    report = copying.report
    assert list(report["methods"]) == ["vanilla", "lookup"]
    assert report["manifest"]["drafts"]["lookup"]["tree"] == "copy:25"
    assert copying.result["equal"] == {"lookup": 2}
    cell = report["methods"]["lookup"]["overall"]
    assert cell["tau"] >= 1
    assert cell["accuracy"] is None  # nobody ranks what a copy would say
    assert report["methods"]["lookup"]["step"]["draft"] > 0
    assert "| lookup | copy:25 (25) |" in (copying.output / "report.md").read_text()
