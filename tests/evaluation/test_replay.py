"""`evaluate --replay`: what copies alone would give on texts that are written already."""

import dataclasses
import json

import pytest

from clover_jax.decoding.step import StepConfig
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.evaluation.replayed import Written, replay_rows
from clover_jax.evaluation.rows import turns_of
from tests.evaluation.command import run, write_rows
from tests.tiny_models import TINY

ROWS = [
    {"category": "echo", "prompt": "he", "response": "the cat and the hat " * 4},
    {"category": "echo", "prompt": "and", "response": "the hat and the cat " * 4},
    {"prompt_ids": [1, 2, 3], "output_ids": list(range(20, 50))},
    {"category": "chat", "messages": [{"role": "user", "content": "no answer"}]},
]


def replayed(name, tree, *texts):
    """Return the rows of (prompt, answer) pairs, for a draft without training."""
    base = dataclasses.replace(TINY, num_layers=0)
    head = registry.head(registry.config_for_base(name, base))
    written = [Written("any", prompt, answer) for prompt, answer in texts]
    return list(replay_rows(written, StepConfig(base, head, parse_tree(tree))))


def test_texts_that_were_decoded_have_the_accepted_lengths_of_decoding(copying):
    turns = [turn for row in copying.rows("lookup") for turn in turns_of(row)]
    rows = replayed("lookup", "copy:25", *((turn.prompt_ids, turn.output_ids) for turn in turns))
    decoded = {tuple(turn.prompt_ids): turn for turn in turns}
    assert len(rows) == len(decoded) == 3
    for row in rows:
        turn = decoded[tuple(row["prompt_ids"])]
        # What the end of a text cuts off its last forward, nobody knows afterwards.
        assert row["accepted"][:-1] == turn.accepted[:-1]
        assert row["proposed"][:-1] == turn.proposed[:-1]
        assert len(row["accepted"]) == len(turn.accepted)
    assert any(any(row["accepted"]) for row in rows)


def test_a_text_that_says_nothing_twice_has_no_copies():
    (row,) = replayed("lookup", "copy:4", ([1, 2, 3], list(range(9, 90))))
    assert row["accepted"] == [0] * 80


def test_recycle_goes_on_as_the_prompt_did():
    new, learned = replayed(
        "recycle", "dynamic:12:10:2", ([1, 2], [8, 9, 8, 9, 8]), ([5, 6, 7] * 40, [5, 6, 7] * 6)
    )
    # 18 tokens, of which prefill gives the first: ten drafted and a bonus, then six.
    assert learned["accepted"] == [10, 6]
    assert new["accepted"] == [0, 0, 2]  # a pair is known once both of its tokens are read


def test_a_file_is_reported_by_kind(folder):
    write_rows(folder, "written.jsonl", ROWS)
    argv = ("--drafts=", "--tree=copy:8", "--baselines=lookup,recycle")
    done = run(folder, folder / "done", *argv, f"--replay={folder / 'written.jsonl'}")
    assert done.status == 0, done.err
    assert done.result["answers"] == 3
    assert done.result["tau_by_kind"]["lookup"]["written"] == 1
    report = json.loads((done.output / "replay.json").read_text())
    assert (report["rows"], report["rows_without_answer"]) == (4, 1)
    lookup, recycle = (report["methods"][name] for name in ("lookup", "recycle"))
    assert (lookup["tree"], recycle["tree"]) == ("copy:8", "dynamic:25:20:3")
    echo = lookup["kinds"]["echo"]
    assert (echo["turns"], echo["repeats"]["looping_turns"]) == (2, 2)
    assert echo["tau"] > lookup["overall"]["tau"] > 1
    assert recycle["kinds"]["echo"]["tau"] > 1
    page = (done.output / "replay.md").read_text()
    assert f"| echo | 2 | {echo['tokens']} | " in page
    assert f"| 2 of 2 | {echo['tau']:.2f} | " in page
    assert "4 rows of" in page


@pytest.mark.parametrize(
    "ids",
    [
        {"prompt_ids": [1, 2], "output_ids": [3, 10**6]},
        {"prompt_ids": [1, 2**31], "output_ids": [3, 4]},
    ],
)
def test_tokens_that_the_base_does_not_have_are_refused_by_name(folder, ids):
    write_rows(folder, "foreign.jsonl", [ROWS[2], ids])
    own = ("--drafts=", "--tree=", "--baselines=lookup", f"--replay={folder / 'foreign.jsonl'}")
    asked = run(folder, folder / "foreign", *own)
    assert asked.status == 2
    wrong = max(*ids["prompt_ids"], *ids["output_ids"])
    assert f"foreign.jsonl:2: token id {wrong} is outside the base's vocabulary" in asked.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--tree=paper25",), "--tree=paper25: the tree of lookup should be copy:N"),
        (("--drafts=a=runs/a", "--tree=copy:4"), "leave --drafts=a=runs/a out"),
        (("--tree=", "--baselines=none"), "nothing to measure with --baselines=none"),
        (("--tree=copy:4",), "no row has an answer"),
    ],
)
def test_what_cannot_be_replayed_is_said(folder, argv, said):
    write_rows(folder, "asked.jsonl", ROWS[3:])
    own = ("--drafts=", "--baselines=lookup", f"--replay={folder / 'asked.jsonl'}")
    asked = run(folder, folder / "asked", *own, *argv)
    assert asked.status == 2
    assert said in asked.err
