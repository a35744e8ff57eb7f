"""The page: what it says, and what it does not say twice."""

import copy

from clover_jax.evaluation.markdown import report_text


def test_plain_decoding_has_one_name_and_its_key_is_explained_once(finished):
    page = report_text(finished.report, []).split("## Manifest")[0]
    assert page.count("vanilla") == 1
    assert "is `vanilla`" in page.split("## Definitions")[1]
    assert "| plain decoding | none (0) | 1.00 |" in page
    assert "vanilla" not in finished.err


def test_definitions_say_what_an_end_cuts_and_how_tasks_are_joined(finished):
    definitions = report_text(finished.report, []).split("## Definitions")[1]
    assert "tau counts tokens after this cut" in definitions
    assert "count what was accepted before it" in definitions
    assert "micro-average" in definitions


def test_one_task_has_one_table(finished):
    single = copy.deepcopy(finished.report)
    single["tasks"] = ["writing"]
    pages = [report_text(report, []) for report in (finished.report, single)]
    assert [page.count("## By task") for page in pages] == [1, 0]
    assert "## Overall (task writing)" in pages[1]
    assert [page.count("| tokens/s | speed-up |") for page in pages] == [4, 1]
