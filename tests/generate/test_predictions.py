"""Texts to copy from that a row brings, or all rows share: they make it faster, never different."""

import json

import pytest

from clover_jax import api
from clover_jax.data.prompts import parse_prompt
from clover_jax.errors import UserError

PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push", "import os\n\ndef main(")


@pytest.fixture(scope="module")
def base():
    return api.load_base()


@pytest.fixture(scope="module")
def plain(base):
    return decode(base, [{"prompt": prompt} for prompt in PROMPTS])


def decode(models, rows):
    decoded = api.generate_rows(models, rows, max_new_tokens=48, batch_size=2)
    return sorted(decoded, key=lambda row: row["index"])


def forwards(rows):
    return [row["target_forwards"] for row in rows]


def test_a_right_prediction_makes_text_arrive_sooner_and_a_wrong_one_changes_nothing(base, plain):
    models = api.load_draft(base, "lookup", "copy:12")
    right = [
        {"prompt": p, "prediction": row["text"]} for p, row in zip(PROMPTS, plain, strict=True)
    ]
    predictions = ("Nothing of this is Python. " * 9, "a" * 100_000, "a" * 100_000)
    wrong = [{"prompt": p, "prediction": w} for p, w in zip(PROMPTS, predictions, strict=True)]
    alone, helped, misled = (
        decode(models, rows) for rows in ([{"prompt": p} for p in PROMPTS], right, wrong)
    )
    for rows in (alone, helped, misled):
        assert [row["text"] for row in rows] == [row["text"] for row in plain]
    assert max(forwards(helped)) < min(forwards(plain)) / 4
    assert sum(forwards(helped)) < sum(forwards(alone))
    # What one row brings is no other's.
    mixed = decode(models, [right[0], {"prompt": PROMPTS[1]}, wrong[2]])
    assert forwards(mixed)[0] == forwards(helped)[0]


def test_all_rows_copy_from_one_file(base, plain, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(row["text"] for row in plain))
    models = api.load_draft(base, "lookup", "copy:12", copy_from=path)
    rows = decode(models, [{"prompt": p} for p in PROMPTS])
    assert [row["text"] for row in rows] == [row["text"] for row in plain]
    assert max(forwards(rows)) < min(forwards(plain)) / 3


def test_copies_beside_a_tree_are_asked_for_by_flag_or_by_name(base):
    assert api.load_draft(base, "lookup").tree.name == "copy:25"
    assert api.load_draft(base, "lookup", copy=4).tree.name == "copy:4"
    beside = api.load_draft(base, "lookup", "chain:2", copy=4).tree
    assert (beside.name, beside.num_nodes, beside.depth) == ("chain:2+copy:4", 6, 4)
    with pytest.raises(UserError, match="has copies already"):
        api.load_draft(base, "lookup", "copy:3", copy=4)
    with pytest.raises(UserError, match="--copy=4 needs a draft"):
        api.load_draft(base, "none", copy=4)
    with pytest.raises(UserError, match="has no copies"):
        api.load_draft(base, "random:clover2", copy_from=__file__)


def test_a_file_to_copy_from_that_cannot_be_read_is_named(base, tmp_path):
    with pytest.raises(UserError, match="--copy_from=.*nothing"):
        api.load_draft(base, "lookup", copy_from=tmp_path / "nothing")
    with pytest.raises(UserError, match="prediction must be a string"):
        parse_prompt(json.loads('{"prompt": "a", "prediction": 5}'), 0, "rows")
