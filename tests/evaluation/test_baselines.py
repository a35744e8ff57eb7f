"""What drafts without training stands in every report."""

from clover_jax.evaluation.rows import turns_of


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
