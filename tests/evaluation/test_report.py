"""What a run measures, writes, compares and takes up again, and what makes it fail."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from clover_jax import evaluate
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.decoding.models import Models
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.evaluation.equality import Divergence, judge
from clover_jax.evaluation.page import report_text
from clover_jax.evaluation.plan import Method, PassJournal, Plan
from clover_jax.evaluation.report import conditions, slow_drafts
from clover_jax.evaluation.rows import turns_of
from clover_jax.runtime.progress import progress_bar
from tests.conftest import rows_in, run_command
from tests.evaluation.conftest import ROWS, run, write_rows
from tests.tiny_models import TINY, random_head


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
    # Other figures are counted again in test_tally.py.
    assert len(report["methods"]["chain"]["overall"]["accuracy"]["top_5"]) == 5
    assert report["problems"] == []


def test_speed_is_measured_in_turns_at_every_batch_size(finished):
    passes = PassJournal(finished.output, conditions(None), overwrite=False).select()
    assert len(passes) == 2 * 2 * 2 * 3  # batch sizes, tasks, repeats, methods
    first, second = ["vanilla", "chain", "short"], ["chain", "short", "vanilla"]
    assert [one.key.method for one in passes[:6]] == [*first, *second]
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


def test_definitions_explain_the_key_of_plain_decoding_cuts_and_averages(finished):
    page = report_text(finished.report, []).split("## Manifest")[0]
    assert page.count("vanilla") == 1
    assert "| plain decoding | none (0) | 1.00 |" in page
    assert "vanilla" not in finished.err
    definitions = " ".join(page.split("## Definitions")[1].split())  # wherever its lines end
    explained = "is `vanilla`", "tau counts tokens after this cut", "micro-average"
    assert all(words in definitions for words in explained)
    assert "count what was accepted before it" in definitions


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
    starts_late = {}

    def noted(total, desc, unit, *, first_compiles=False, **options):
        starts_late[desc] = first_compiles
        return progress_bar(total, desc, unit, first_compiles=first_compiles, **options)

    monkeypatch.setattr("clover_jax.evaluation.run.progress_bar", noted)
    write_rows(folder, "single.jsonl", [{"prompt": "he"}])
    one = (f"--drafts=chain={folder / 'work'}", "--tree=chain:2", "--repeats=1")
    assert run(folder, folder / "bars", *one, prompts="single.jsonl").status == 0
    # The programs for accuracy and parts compile while the bar is shown, those of passes before it.
    assert starts_late == {"batch size 2": False, "accuracy": True, "parts of a step": True}


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


def tamper(output, name, rows, place):
    """Write rows of which the first has another token at a place."""
    ids = rows[0]["output_ids"][0]
    ids[place] = (ids[place] + 7) % 261
    write_rows(output / "rows", f"{name}.jsonl", rows)


def test_another_text_than_plain_decoding_s_fails_the_run(finished, folder):
    output = folder / "tampered"
    shutil.copytree(finished.output, output)
    tamper(output, "chain", finished.rows("chain"), 4)
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
    passes = rows_in(output / "legs.jsonl")
    last = {(one["method"], one["batch_size"]): one for one in passes}
    for key, rows in changed.items():
        last[key]["changed"] = rows
    write_rows(output, "legs.jsonl", passes)


def test_a_later_pass_is_held_against_the_first(finished, folder):
    output = folder / "again"
    shutil.copytree(finished.output, output)
    tamper(output, "short", finished.rows("short"), 2)
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
    found = judge(comparisons, {}, plan, vanilla=None, is_expected=False)
    assert found == {3: Divergence(3, 0, 1, 5, 6)}
    head, _ = random_head()
    draft = Draft(head, None, None, {}, "random")
    base = BaseModel(TINY, None, Path(), "random")
    drawn = Method("a", Models(base, None, draft, parse_tree("chain:2")))
    assert not plan.expects_equality(drawn)


def test_two_reports_are_set_side_by_side(finished, folder, capsys):
    other = folder / "other"
    shutil.copytree(finished.output, other)
    report = finished.report
    report["manifest"]["prompts"]["hash"] = "f" * 64
    report["manifest"]["base"]["chat_template"] = "e" * 64
    report["manifest"]["hardware"]["cores"] = 999
    report["manifest"]["flags"]["int8"] = ["base", "draft"]
    (other / "report.json").write_text(json.dumps(report))
    arguments = f"--compare={finished.output},{other}", f"--output={folder / 'beside'}"
    status, lines, error = run_command(capsys, evaluate, *arguments)
    assert status == 0
    result = json.loads(lines[-1])
    assert list(result["tau"]) == ["out: chain", "out: short", "other: chain", "other: short"]
    assert result["tau"]["out: short"] == finished.result["tau"]["short"]
    ours = finished.report["manifest"]
    assert result["differences"]["texts"] == [
        f"base chat_template {ours['base']['chat_template']} against eeeeeeeeeeee",
        f"prompts {ours['prompts']['hash'][:12]} against ffffffffffff",
        "int8 base False against True",
    ]
    assert "not the same texts: prompts" in error
    assert "not the same conditions for times: cores" in error
    assert (folder / "beside" / "compare.md").read_text().startswith("# out against other")


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_killed_run_goes_on_and_says_so(finished, folder, monkeypatch):
    output, add = folder / "killed", PassJournal.add

    def add_four(self, timed):
        if len(self.select()) == 4:
            raise KeyboardInterrupt
        add(self, timed)

    monkeypatch.setattr("clover_jax.evaluation.run.git_revision", lambda: "one")
    monkeypatch.setattr(PassJournal, "add", add_four)
    assert run(folder, output).status == 130
    monkeypatch.setattr("clover_jax.evaluation.run.git_revision", lambda: "other")
    monkeypatch.setattr(PassJournal, "add", add)
    assert not (output / "report.json").exists()
    begun = (output / "rows" / "chain.jsonl").read_text()
    resumed = run(folder, output)
    assert resumed.status == 0
    assert "6 rows and 8 of 24 timed rows are there already" in resumed.err
    assert (output / "rows" / "chain.jsonl").read_text().startswith(begun)
    for name in ("vanilla", "chain", "short"):
        assert without_times(resumed.rows(name)) == without_times(finished.rows(name))
        cells = (report["methods"][name]["overall"] for report in (resumed.report, finished.report))
        assert next(cells) == next(cells)
    assert resumed.report["sessions"] == [0, 1]
    assert resumed.report["manifest"]["git_revision"] == "one, other"
    assert resumed.report["split_turns"] == [{"batch_size": 2, "task": "writing", "repeat": 1}]
    page = (output / "report.md").read_text()
    assert "stopped and resumed: times are of 2 sessions, and in 1 rounds" in page

    other = run(folder, output, "--max_new_tokens=8")
    assert (other.status, other.out) == (2, [])
    assert "was written with max_new_tokens 9, not 8" in other.err


def test_the_same_prompts_as_another_task_are_refused(folder):
    for name in ("one.jsonl", "two.jsonl"):
        write_rows(folder, name, [{"prompt": "a"}, {"prompt": "b"}])
    once = ("--repeats=1", "--drafts=", "--tree=none")
    assert run(folder, folder / "renamed", *once, prompts="one.jsonl").status == 0
    again = run(folder, folder / "renamed", *once, prompts="two.jsonl")
    assert again.status == 2
    assert "was written with tasks ['one'], not ['two']" in again.err
