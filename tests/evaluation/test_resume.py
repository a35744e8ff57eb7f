"""A run that was killed, and one that is repeated with something else."""

from clover_jax.evaluation.plan import PassJournal
from tests.evaluation.command import run, write_rows


def without_times(rows):
    def timeless(row):
        return {key: value for key, value in row.items() if key != "seconds"}

    return [timeless(row) for row in rows]


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
    assert (
        "stopped and resumed: times are of 2 sessions, and in 1 rounds"
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
