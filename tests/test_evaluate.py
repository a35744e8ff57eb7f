"""The evaluate command on random tiny models: what it measures, writes, resumes and refuses."""

import contextlib
import functools
import io
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from clover_jax import cli, evaluate
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.sampling import SamplingConfig
from clover_jax.evaluation.equality import Comparison, Divergence
from clover_jax.evaluation.legs import LegJournal
from clover_jax.evaluation.manifest import conditions
from clover_jax.evaluation.plan import Plan
from clover_jax.evaluation.rows import turns_of
from clover_jax.evaluation.run import classify
from clover_jax.generation import models
from clover_jax.generation.settings import GenerationSettings
from clover_jax.training.settings import TrainSettings
from tests.tiny_folders import save_tiny_base, save_tiny_draft

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["the hat", "and the cat"]},
    {"category": "qa", "turns": ["he"]},
    {"category": "writing", "turns": ["at the " * 80]},
    {"category": "qa", "turns": ["is it?"]},
]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Trace the programs of each kind of engine once, not in every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "Engine", functools.cache(Engine))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    base = save_tiny_base(folder / "base")
    workdir = folder / "work"
    save_tiny_draft(workdir / "draft", base)
    (workdir / "eval.jsonl").write_text('{"step": 5, "tau": 1.5}\n{"step": 10, "tau": 1.75}\n')
    settings = {"settings": TrainSettings(batch_size=4, seq_len=8).to_dict(), "identity": {}}
    (workdir / "settings.json").write_text(json.dumps(settings))
    write_rows(folder, "bench.jsonl", ROWS)
    return folder


def write_rows(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Finished(NamedTuple):
    """A run of the command, in this process."""

    status: int
    out: list[str]
    err: str
    output: Path

    @property
    def report(self):
        return json.loads((self.output / "report.json").read_text())

    @property
    def result(self):
        return json.loads(self.out[-1])

    def rows(self, name):
        lines = (self.output / "rows" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def run(folder, output, *argv, prompts="bench.jsonl"):
    """Measure one draft with two trees."""
    arguments = [
        *(f"--base={folder / 'base'}", f"--prompts={folder / prompts}"),
        *(f"--drafts=chain={folder / 'work'},short={folder / 'work'}", "--tree=short=chain:1"),
        *(f"--output={output}", "--batch_size=2", "--max_new_tokens=9", "--repeats=2"),
        *("--context_overflow=truncate_left", *map(str, argv)),
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(evaluate.main, evaluate.define_flags, arguments)
    return Finished(status, out.getvalue().splitlines(), err.getvalue(), output)


@pytest.fixture(scope="module")
def finished(folder):
    """A run that was never stopped, at two batch sizes."""
    return run(folder, folder / "out", "--batch_sizes=1")


def without_times(rows):
    def timeless(row):
        return {key: value for key, value in row.items() if key != "seconds"}

    return [timeless(row) for row in rows]


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
    for name, depth in (("chain", 2), ("short", 1)):
        cell = finished.report["methods"][name]["overall"]
        turns = [turn for row in finished.rows(name) for turn in turns_of(row)]
        accepted = [count for turn in turns for count in turn.accepted]
        assert cell["turns"] == len(turns) == 5
        assert cell["tokens"] == sum(len(turn.output_ids) for turn in turns) == 45
        assert cell["tau"] == pytest.approx((45 - 5) / len(accepted))
        assert cell["hit_rate"] == [
            pytest.approx(sum(count > i for count in accepted) / len(accepted))
            for i in range(depth)
        ]
        assert cell["num_accepted_tokens"] == sum(accepted)
        assert cell["num_draft_tokens"] == len(accepted) * depth
        assert len(cell["accuracy"]["top_5"]) == 5
        parts = [finished.report["methods"][name]["tasks"][task] for task in ("writing", "qa")]
        assert [part["rows"] for part in parts] == [2, 2]
        assert sum(part["target_forwards"] for part in parts) == len(accepted)


def test_speed_is_measured_in_turns_at_every_batch_size(finished):
    legs = LegJournal(finished.output, conditions(None), overwrite=False).select()
    assert len(legs) == 2 * 2 * 2 * 3  # batch sizes, tasks, repeats, methods
    assert [leg.method for leg in legs[:6]] == [
        *("vanilla", "chain", "short"),
        *("chain", "short", "vanilla"),
    ]
    assert all(leg.tokens in (18, 27) and leg.rows_changed == 0 for leg in legs)
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
    assert "cut on the left to fit it: 1." in page
    names = ("hit_rate", "accepted_lengths", "accepted_by_context", "speedup_by_task")
    for name in (*names, "speedup_by_batch_size", "tau_by_step", "tau_by_tokens"):
        assert f"![{name}](plots/{name}.png)" in page
        assert (finished.output / "plots" / f"{name}.png").stat().st_size > 5000
        assert (finished.output / "plots" / f"{name}.svg").exists()
    manifest = finished.report["manifest"]
    assert manifest["drafts"]["short"]["tree"] == "chain:1"
    assert manifest["flags"]["max_new_tokens"] == 9
    assert len(manifest["prompts"]["hash"]) == len(manifest["base"]["hash"]) == 64
    assert finished.report["training"]["short"][-1] == {
        "step": 10,
        "tau": 1.75,
        "tokens": 320,
    }
    assert "qa (batch size 2): vanilla" in finished.err
    assert "no chat template: in 4 of 4 rows" in finished.err


def test_a_killed_run_goes_on_and_says_so(finished, folder, monkeypatch):
    output, add = folder / "killed", LegJournal.add

    def add_four(self, leg):
        if len(self.select()) == 4:
            raise KeyboardInterrupt
        add(self, leg)

    monkeypatch.setattr(LegJournal, "add", add_four)
    assert run(folder, output).status == 130
    monkeypatch.setattr(LegJournal, "add", add)
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
    assert resumed.report["split_turns"] == [{"batch_size": 2, "task": "writing", "repeat": 1}]
    assert (
        "stopped and resumed: times are of 2 sessions, and in 1 turns"
        in (output / "report.md").read_text()
    )

    other = run(folder, output, "--max_new_tokens=8")
    assert (other.status, other.out) == (2, [])
    assert "was written with max_new_tokens 9, not 8" in other.err


def test_the_same_prompts_as_another_task_are_refused(folder):
    plain = [{"prompt": "a"}, {"prompt": "b"}]
    write_rows(folder, "one.jsonl", plain)
    write_rows(folder, "two.jsonl", plain)
    once = ("--repeats=1", "--drafts=", "--tree=none")
    assert run(folder, folder / "renamed", *once, prompts="one.jsonl").status == 0
    again = run(folder, folder / "renamed", *once, prompts="two.jsonl")
    assert again.status == 2
    assert "was written with tasks ['one'], not ['two']" in again.err


def test_a_row_that_fails_fails_the_run_and_is_counted(folder):
    write_rows(folder, "bad.jsonl", [*ROWS[1:2], {"category": "qa", "promp": "misspelt"}])
    failing = run(folder, folder / "failing", "--repeats=1", prompts="bad.jsonl")
    assert failing.status == 1
    assert failing.result["failed"] == 1
    assert failing.result["problems"] == [
        f"{name}: 1 of 2 rows failed" for name in ("vanilla", "chain", "short")
    ]
    assert "vanilla: row 1 failed: " in failing.err
    cell = failing.report["methods"]["chain"]["overall"]
    assert (cell["rows"], cell["failed"], cell["turns"]) == (2, 1, 1)
    assert cell["equality"]["not_compared"] == 1
    assert "**Problem: chain: 1 of 2 rows failed.**" in (failing.output / "report.md").read_text()


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


def test_sampled_text_is_that_of_plain_sampling(folder):
    one = (f"--drafts=chain={folder / 'work'}", "--tree=chain:2", "--limit_prompts=1")
    hot = run(folder, folder / "hot", "--temperature=0.9", "--repeats=1", *one)
    assert hot.status == 0
    assert hot.result["equal"] == {"chain": 2}
    assert hot.report["is_equality_expected"]


@pytest.mark.parametrize(
    "sampling", [SamplingConfig("typical"), SamplingConfig("lossless", "sampled")]
)
def test_where_no_equality_is_expected_no_difference_is_judged(sampling):
    settings = GenerationSettings()
    plan = Plan({}, settings, sampling, seed=0, repeats=1, batch_sizes=[2], longest=9)
    comparisons = {3: Comparison(True, Divergence(3, 0, 1, 5, 6)), 4: Comparison(True)}
    # Without a base: nothing is decoded again.
    found = classify(comparisons, {}, plan, {}, vanilla=None)
    assert found == {3: Divergence(3, 0, 1, 5, 6)}
    assert not plan.is_equality_expected


def test_two_reports_are_set_side_by_side(finished, folder, capsys):
    other = folder / "other"
    shutil.copytree(finished.output, other)
    report = finished.report
    report["manifest"]["prompts"]["hash"] = "f" * 64
    report["manifest"]["hardware"]["cores"] = 999
    report["manifest"]["flags"]["int8"] = ["base", "draft"]
    (other / "report.json").write_text(json.dumps(report))
    arguments = [f"--compare={finished.output},{other}", f"--output={folder / 'beside'}"]
    assert cli.run(evaluate.main, evaluate.define_flags, arguments) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert list(result["tau"]) == ["out: chain", "out: short", "other: chain", "other: short"]
    assert result["tau"]["out: short"] == finished.result["tau"]["short"]
    assert result["differences"]["texts"] == [
        f"prompts {finished.report['manifest']['prompts']['hash'][:12]} against ffffffffffff",
        "int8 base False against True",
    ]
    assert "not the same texts: prompts" in printed.err
    assert "not the same conditions for times: cores" in printed.err
    assert (folder / "beside" / "compare.md").read_text().startswith("# out against other")
    assert (folder / "beside" / "compare.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare=a"], "--compare=a: give two reports, A,B"),
        (["--compare=/nowhere/a.json,b"], "/nowhere/a.json cannot be read"),
        (["--drafts=x"], "'x' should be NAME=DIR"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["--mesh=data=2"], "--mesh=data=2 asks for 2 devices, but 1 is here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, said, capsys):
    assert cli.run(evaluate.main, evaluate.define_flags, argv) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
