import json

import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.data.records import TokenRow
from clover_jax.errors import UserError
from clover_jax.training.decoding_eval import evaluation_prompts
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_inputs
from tests.conftest import REPOSITORY

BASE = str(REPOSITORY / "tests" / "fixtures" / "clover2_reference" / "base")


@pytest.fixture(scope="module")
def base():
    return load_base(BASE)


def test_a_held_out_rows_prompt_is_decoded(base):
    row = TokenRow("f", tuple(range(10)), (20, 21))
    assert evaluation_prompts(None, [row], base, None, 4) == [list(range(10))]


def test_a_row_that_starts_with_its_answer_gives_its_first_half(base):
    row = TokenRow("f", (1,), tuple(range(20, 33)))
    assert evaluation_prompts(None, [row], base, None, 4) == [[1, *range(20, 26)]]


def test_the_same_prompt_is_decoded_once(base):
    rows = [TokenRow("f", tuple(range(10)), (answer,)) for answer in range(5)]
    rows.append(TokenRow("f", tuple(range(9, 0, -1)), (3,)))
    prompts = evaluation_prompts(None, rows, base, None, 2)
    assert prompts == [list(range(10)), list(range(9, 0, -1))]


def test_a_prompts_file_takes_precedence(base, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [i, 2]}) + "\n" for i in range(5)))
    assert evaluation_prompts(str(path), [], base, None, 3) == [[0, 2], [1, 2], [2, 2]]


def test_no_prompt_at_all_is_refused_with_what_would_be_right(base):
    with pytest.raises(UserError, match="pass --eval_prompts=FILE, or --eval_every=0"):
        evaluation_prompts(None, [], base, None, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "tau will not be measured: the held-out part of --data has no prompt"),
        (60, "only 3 held-out prompts fit (16 wanted); pass --eval_prompts"),
    ],
)
def test_a_run_says_on_how_few_held_out_prompts_it_is_measured(tmp_path, capsys, rows, message):
    """Data of the default settings: too little of it is no reason not to train."""
    path = tmp_path / "rows.jsonl"
    ids = [{"prompt_ids": [*range(i, i + 9)], "output_ids": [1, 2, 3]} for i in range(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in ids))
    inputs = load_inputs(TrainSettings(base=BASE, data=str(path), seq_len=32))
    assert message in capsys.readouterr().err
    assert (inputs.evaluator is None) == (rows == 3)
    # Prompts that the user named must fit.
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt_ids": [1] * 10_000}))
    with pytest.raises(UserError, match=f"{long} has no prompt of 1 to"):
        load_inputs(TrainSettings(base=BASE, data=str(path), seq_len=32, eval_prompts=str(long)))


def test_a_held_out_record_that_cannot_be_read_is_left_out(base, capsys):
    rows = [TokenRow("f:1", (10**6,), (1,)), TokenRow("f:2", tuple(range(10)), (20, 21))]
    assert evaluation_prompts(None, rows, base, None, 4) == [list(range(10))]
    assert "left out a sample: f:1: token id 1000000 is outside" in capsys.readouterr().err
