"""What a run measures and writes: the report, its figures, times, page and plots."""

import copy

import pytest

from clover_jax.evaluation import accuracy
from clover_jax.evaluation.page import report_text
from clover_jax.evaluation.plan import PassJournal
from clover_jax.evaluation.report import conditions
from clover_jax.evaluation.rows import turns_of
from clover_jax.runtime.progress import progress_bar
from tests.evaluation.command import run, write_rows


def test_everything_is_measured_and_the_last_line_says_the_key_figures(finished):
    assert finished.status == 0, finished.err
    result, report = finished.result, finished.report
    assert (result["rows"], result["failed"], result["truncated"]) == (4, 0, 1)
    assert result["equal"] == {"chain": 4, "short": 4}
    assert result["mismatches"] == {"chain": 0, "short": 0}
    assert result["tau"]["chain"] >= result["tau"]["short"] > 1
    assert report["tasks"] == ["writing", "qa"]
    assert list(report["methods"]) == ["vanilla", "chain", "short"]
    assert report["methods"]["vanilla"]["overall"]["tau"] == 1
    assert report["problems"] == []


def test_figures_are_those_of_the_rows(finished):
    # tau, rates and histograms are counted again in test_recount.py.
    for name, depth in (("chain", 2), ("short", 1)):
        cells = finished.report["methods"][name]
        turns = [turn for row in finished.rows(name) for turn in turns_of(row)]
        forwards = sum(len(turn.accepted) for turn in turns)
        assert cells["overall"]["turns"] == len(turns) == 5
        assert cells["overall"]["tokens"] == 45
        assert cells["overall"]["num_draft_tokens"] == forwards * depth
        assert len(cells["overall"]["accuracy"]["top_5"]) == 5
        assert [cells["tasks"][task]["rows"] for task in ("writing", "qa")] == [2, 2]


def test_speed_is_measured_in_turns_at_every_batch_size(finished):
    passes = PassJournal(finished.output, conditions(None), overwrite=False).select()
    assert len(passes) == 2 * 2 * 2 * 3  # batch sizes, tasks, repeats, methods
    assert [one.key.method for one in passes[:6]] == [
        *("vanilla", "chain", "short"),
        *("chain", "short", "vanilla"),
    ]
    assert all(one.tokens in (18, 27) and not one.changed for one in passes)
    for size in ("1", "2"):
        measured = finished.report["speed"][size]["chain"]["overall"]
        assert len(measured["speedup"]["repeats"]) == 2
        assert measured["speedup"]["least"] <= measured["speedup"]["median"]
        assert measured["tokens_per_second"]["median"] > 0
    step = finished.report["methods"]["short"]["step"]
    assert step["draft_share"] + step["verify_share"] + step["rest_share"] == pytest.approx(1)
    assert finished.report["methods"]["vanilla"]["step"]["draft_share"] == 0


def test_the_page_and_the_plots_are_there(finished):
    page = (finished.output / "report.md").read_text()
    assert "| chain | chain:2 (2) |" in page
    assert "truncated on the left to fit it: 1." in page
    for name in ("tau", "acceptance_by_position", "speedup", "tau_by_task"):
        assert f"![{name}](plots/{name}.png)" in page
        assert (finished.output / "plots" / f"{name}.png").stat().st_size > 5000
    manifest = finished.report["manifest"]
    assert manifest["drafts"]["short"]["tree"] == "chain:1"
    assert manifest["flags"]["max_new_tokens"] == 9
    assert len(manifest["prompts"]["hash"]) == len(manifest["base"]["hash"]) == 64
    assert "qa (batch size 2): plain decoding" in finished.err
    assert "no chat template: messages of 4 conversations" in finished.err


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


def test_rows_say_what_was_copied_and_the_page_adds_it_up(copying):
    turns = [turn for row in copying.rows("lookup") for turn in turns_of(row)]
    assert [len(turn.copied) for turn in turns] == [len(turn.accepted) for turn in turns]
    assert all(turn.copied == turn.accepted for turn in turns)  # lookup has nothing else
    assert not any("copied" in row for row in copying.rows("vanilla"))
    cell = copying.report["methods"]["lookup"]["overall"]
    copied = sum(sum(turn.copied) for turn in turns)
    assert cell["copied_tokens"] == cell["num_accepted_tokens"] == copied > 0
    page = (copying.output / "report.md").read_text()
    assert f"| lookup | overall | {copied} | 0 | {copied} | 100.0 % |" in page
    assert "| overall |" in page.split("| lookup: tau where answers loop |")[1]


def test_no_bar_counts_compilation(folder, monkeypatch):
    clocks = {}

    def with_its_clock(total, desc, unit, *, compiling=None, **options):
        clocks[desc] = compiling
        return progress_bar(total, desc, unit, compiling=compiling, **options)

    for module in ("passes", "run"):
        monkeypatch.setattr(f"clover_jax.evaluation.{module}.progress_bar", with_its_clock)
    accuracy.count_hits.clear_cache()  # another test's program would need no compilation
    write_rows(folder, "single.jsonl", [{"prompt": "he"}])
    one = (f"--drafts=chain={folder / 'work'}", "--tree=chain:2", "--repeats=1")
    assert run(folder, folder / "bars", *one, prompts="single.jsonl").status == 0
    assert clocks.keys() == {"batch size 2", "accuracy"}
    # The heads' programs for accuracy compile while the bar is shown.
    assert clocks["accuracy"].seconds > 0
    assert clocks["batch size 2"] is not None
