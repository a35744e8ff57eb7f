"""Which rows belong to which task, and times: speed-ups are ratios within a repeat."""

import dataclasses

import pytest

from clover_jax.data.prompts import BadPrompt, parse_prompt
from clover_jax.evaluation.plan import (
    JOURNAL,
    Origin,
    PassJournal,
    PassKey,
    TimedPass,
    group_by_task,
    speed,
    split_rounds,
    throughputs,
)

MT_BENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]


def rows(*categories):
    return [
        parse_prompt({"prompt": "a", "category": category}, index, f"f:{index}")
        for index, category in enumerate(categories)
    ]


def shape(tasks):
    return {task: [prompt.index for prompt in prompts] for task, prompts in tasks.items()}


def test_tasks_and_rows_keep_their_order():
    assert shape(group_by_task(rows("b", "a", "b"))) == {"b": [0, 2], "a": [1]}


def test_rows_without_a_category_are_named_after_their_file():
    prompts = [parse_prompt({"prompt": "a"}, 0, "dir/HumanEval.jsonl.gz:1")]
    prompts += [BadPrompt(1, "dir/HumanEval.jsonl.gz:2", "bad")]
    prompts += [parse_prompt({"prompt": "a"}, 2, "chats.jsonl:1")]
    assert shape(group_by_task(prompts)) == {"HumanEval": [0, 1], "chats": [2]}


def test_mt_bench_is_one_task_only_beside_others():
    all_eight = [*MT_BENCH, "humanities"]
    assert list(group_by_task(rows(*all_eight))) == all_eight
    mixed = group_by_task(rows(*all_eight, "qa"))
    assert shape(mixed) == {"mt_bench": list(range(8)), "qa": [8]}
    assert list(group_by_task(rows("math", "qa"))) == ["math", "qa"]


def test_a_limit_holds_for_each_task():
    limited = group_by_task(rows("a", "a", "b", "a"), limit=2)
    assert shape(limited) == {"a": [0, 1], "b": [2]}


HERE = {"mesh": None, "hardware": {"device": "cpu", "num_devices": 1}}


def timed(method="a", repeat=0, tokens=100, seconds=2.0, task="qa", session=0):
    key, origin = PassKey(4, task, repeat, method), Origin(session, HERE, None)
    return TimedPass(key, origin, 10, tokens, seconds, 0.0, [])


def test_throughput_is_all_tokens_over_all_seconds():
    # Not the mean of 50 and 200.
    passes = [timed(tokens=100, seconds=2.0), timed(tokens=200, seconds=1.0, task="rag")]
    assert throughputs(passes) == {0: 100.0}


def test_speed_up_is_the_median_of_the_ratios_within_repeats():
    plain = [timed("vanilla", repeat, seconds=s) for repeat, s in enumerate([2.0, 4.0, 1.0])]
    drafted = [timed("a", repeat, seconds=s) for repeat, s in enumerate([1.0, 1.0, 1.0])]
    found = speed(drafted, plain)["speedup"]
    assert (found["median"], found["least"], found["most"]) == (2.0, 1.0, 4.0)
    assert found["repeats"] == (2.0, 4.0, 1.0)
    assert speed([], plain)["speedup"] is None


def test_the_journal_survives_a_torn_line(tmp_path):
    journal = PassJournal(tmp_path, HERE, overwrite=False)
    assert journal.origin.session == 0
    journal.add(timed())
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"batch_size": 4, "ta')
    again = PassJournal(tmp_path, HERE, overwrite=False)
    assert again.origin.session == 1
    assert timed().key in again
    assert timed(repeat=1).key not in again
    again.add(timed(repeat=1))
    assert PassJournal(tmp_path, HERE, overwrite=False).select(method="a") == [
        timed(),
        timed(repeat=1),
    ]
    assert PassJournal(tmp_path, HERE, overwrite=True).select() == []


def test_passes_of_other_conditions_are_measured_again(tmp_path):
    PassJournal(tmp_path, HERE, overwrite=False).add(timed())
    elsewhere = HERE | {"mesh": "data=2"}
    there = PassJournal(tmp_path, elsewhere, overwrite=False)
    assert timed().key not in there
    assert there.num_dropped == 1
    assert timed().key not in PassJournal(tmp_path, HERE, overwrite=False)  # and are gone


def test_rounds_that_a_stop_has_split_are_listed():
    passes = [timed("vanilla"), timed("a"), timed("vanilla", 1), timed("a", 1, session=1)]
    assert split_rounds(passes) == [{"batch_size": 4, "task": "qa", "repeat": 1}]
    here = Origin(3, HERE, None)
    assert split_rounds(dataclasses.replace(one, origin=here) for one in passes) == []


def test_a_row_of_the_journal_is_flat_and_read_back():
    row = timed().to_row()
    assert list(row) == [
        *("batch_size", "task", "repeat", "method", "rows", "tokens", "seconds"),
        *("compile_seconds", "changed", "session", "conditions", "revision"),
    ]
    assert TimedPass.from_row(row) == timed()


def test_a_pass_without_time_has_no_throughput():
    assert throughputs([timed(tokens=0, seconds=0.0)]) == {}
    assert speed([timed()], [])["tokens_per_second"]["median"] == pytest.approx(50)
