"""What a run measures and writes: the report, its figures, times, page and plots."""

import pytest

from clover_jax.evaluation.manifest import conditions
from clover_jax.evaluation.rows import turns_of
from clover_jax.evaluation.timed_passes import PassJournal


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
    assert "cut on the left to fit it: 1." in page
    names = ("hit_rate", "accepted_lengths", "accepted_by_context", "speedup_by_task")
    curves = ("tau_by_step", "tau_by_tokens", "tau_by_seconds")
    for name in (*names, "speedup_by_batch_size", *curves):
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
        "seconds": 4.0,
    }
    assert "qa (batch size 2): plain decoding" in finished.err
    assert "no chat template: messages of 4 conversations" in finished.err
