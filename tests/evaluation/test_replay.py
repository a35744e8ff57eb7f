"""`evaluate --replay`: what copies alone would give on texts that are written already."""

import json

import pytest

from clover_jax.decoding.tree import parse_tree
from clover_jax.evaluation.replay import Written, replay_rows
from clover_jax.evaluation.rows import turns_of
from tests.evaluation.command import run, write_rows

ROWS = [
    {"category": "echo", "prompt": "he", "response": "the cat and the hat " * 4},
    {"category": "echo", "prompt": "and", "response": "the hat and the cat " * 4},
    {"prompt_ids": [1, 2, 3], "output_ids": list(range(20, 50))},
    {"category": "chat", "messages": [{"role": "user", "content": "no answer"}]},
]


def test_texts_that_were_decoded_have_the_accepted_lengths_of_decoding(copying):
    turns = [turn for row in copying.rows("lookup") for turn in turns_of(row)]
    written = [Written("any", turn.prompt_ids, turn.output_ids) for turn in turns]
    replayed = list(replay_rows(written, parse_tree("copy:25")))
    decoded = {tuple(turn.prompt_ids): turn for turn in turns}
    assert len(replayed) == len(decoded) == 3
    for row in replayed:
        turn = decoded[tuple(row["prompt_ids"])]
        # What the end of a text cuts off its last forward, nobody knows afterwards.
        assert row["accepted"][:-1] == turn.accepted[:-1]
        assert row["proposed"][:-1] == turn.proposed[:-1]
        assert len(row["accepted"]) == len(turn.accepted)
    assert any(any(row["accepted"]) for row in replayed)


def test_a_text_that_says_nothing_twice_has_no_copies():
    (row,) = replay_rows([Written("any", [1, 2, 3], list(range(9, 99)))], parse_tree("copy:4"))
    assert row["accepted"] == [0] * 89


def test_a_file_is_reported_by_kind(folder):
    write_rows(folder, "written.jsonl", ROWS)
    argv = ("--drafts=", "--tree=copy:8", f"--replay={folder / 'written.jsonl'}")
    replayed = run(folder, folder / "replayed", *argv)
    assert replayed.status == 0, replayed.err
    assert replayed.result["answers"] == 3
    assert replayed.result["tau_by_kind"]["written"] == 1
    report = json.loads((replayed.output / "replay.json").read_text())
    assert (report["rows"], report["rows_without_answer"], report["tree"]) == (4, 1, "copy:8")
    echo = report["kinds"]["echo"]
    assert (echo["turns"], echo["repeats"]["looping_turns"]) == (2, 2)
    assert echo["tau"] > report["overall"]["tau"] > 1
    page = (replayed.output / "replay.md").read_text()
    assert f"| echo | 2 | {echo['tokens']} | {echo['tau']:.2f} |" in page
    assert "4 rows of" in page


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--drafts=", "--tree=paper25"), "--tree=paper25 should be copy:N"),
        (("--drafts=a=runs/a", "--tree=copy:4"), "leave --drafts=a=runs/a out"),
        (("--drafts=", "--tree=copy:4"), "no row has an answer"),
    ],
)
def test_what_cannot_be_replayed_is_said(folder, argv, said):
    write_rows(folder, "asked.jsonl", ROWS[3:])
    asked = run(folder, folder / "asked", *argv, f"--replay={folder / 'asked.jsonl'}")
    assert asked.status == 2
    assert said in asked.err
