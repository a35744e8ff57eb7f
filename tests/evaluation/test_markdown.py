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
    page = report_text(finished.report, [])
    definitions = " ".join(page.split("## Definitions")[1].split())  # wherever its lines end
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


def test_positions_that_were_never_accepted_and_empty_columns_are_left_out(finished):
    report = copy.deepcopy(finished.report)
    name = next(iter(report["manifest"]["drafts"]))
    cell = report["methods"][name]["overall"]
    cell |= {"hit_rate": [0.5, 0, 0], "conditional_hit_rate": [0.5, 0, None], "accuracy": None}
    cell["accepted_histogram"] = [5, 5, 0, 0]
    report["manifest"]["drafts"][name] |= {"kind": "lookup", "source": "lookup", "steps": None}
    page = report_text(report, [])
    table = page.split("## By position")[1].split("###")[1].strip().splitlines()[2:]
    assert table[0] == "| position | joint hit rate | conditional hit rate |"
    assert table[2:] == ["| 0 | 0.500 | 0.500 |"]
    accepted = page.split("## Accepted drafted tokens")[1].split("| tokens before")[0]
    assert "\n| 1 | 5 |" in accepted
    assert "\n| 2 |" not in accepted
    assert f"| draft {name} | lookup, from the text |" in page
    assert "=None" not in page
