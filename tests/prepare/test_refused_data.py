"""Folders that a run may not be trained on, and what each error says."""

import json
import shutil

import pytest

from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import load_training_data
from clover_jax.errors import UserError
from tests.conftest import REPOSITORY
from tests.prepare.prepared_data import SEQ_LEN, load
from tests.tiny_folders import SPEAKING


def test_samples_of_another_tokenizer_are_refused_with_both_hashes(prepared):
    with pytest.raises(
        UserError, match=r"another tokenizer than the base's: \w{12} against \w{12}"
    ):
        load_training_data(
            str(prepared), load_tokenizer(REPOSITORY / "clover_jax/assets/tiny"), 300, SEQ_LEN
        )


def test_samples_for_a_larger_vocabulary_are_refused(base, prepared):
    with pytest.raises(UserError, match="for a vocabulary of 261 tokens and the base has 200"):
        load_training_data(str(prepared), load_tokenizer(base), 200, SEQ_LEN)


def test_samples_of_another_chat_template_are_refused(base, prepared):
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template += "{# edited #}"
    with pytest.raises(UserError, match="was prepared with another chat template than"):
        load_training_data(str(prepared), tokenizer, SPEAKING.vocab_size, SEQ_LEN)


def test_another_row_length_is_refused(base, prepared):
    with pytest.raises(UserError, match="prepared with --seq_len=64, not 32"):
        load_training_data(str(prepared), load_tokenizer(base), SPEAKING.vocab_size, 32)


def test_a_prepared_folder_among_others_is_not_read_as_raw_data(base, data, prepared):
    with pytest.raises(UserError, match="was made by `prepare`.*give it to `train`, alone"):
        load(f"{data},{prepared}", base)


@pytest.mark.parametrize("written", ["heldout.json", "regenerated.jsonl.manifest.json"])
def test_a_folder_that_is_not_finished_is_not_read_as_raw_data(base, prepared, tmp_path, written):
    for name in (written, "regenerated.jsonl"):
        shutil.copy(prepared / "heldout.json", tmp_path / name)
    with pytest.raises(UserError, match="is not complete; repeat the `prepare`"):
        load(str(tmp_path), base)


def test_a_train_json_of_the_users_is_raw_data(base, tmp_path):
    rows = [{"prompt_ids": [1, 2], "output_ids": [3, 4, n]} for n in range(5, 25)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    assert len(load(str(tmp_path), base).samples)
