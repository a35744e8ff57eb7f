"""`--draft_vocab` through the setting up of a run."""

import json

import pytest

from clover_jax.errors import UserError
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_inputs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt_ids": [90, 91], "output_ids": [7, 8, 9, 7]}] * 3
    rows += [{"prompt_ids": [90], "output_ids": [50]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["clover2", "eagle", "eagle3"])
def test_the_most_frequent_tokens_become_the_heads_vocabulary(fixtures_dir, data, capsys, kind):
    base = str(fixtures_dir / "clover2_reference" / "base")
    settings = TrainSettings(base=base, data=data, drafter=kind, seq_len=32, draft_vocab=4)
    inputs = load_inputs(settings)
    # 2 ends a text of this base, so it is kept although the data lack it.
    assert inputs.head.config.draft_to_target == (2, 7, 8, 9)
    assert inputs.draft_vocab_coverage == 12 / 13
    assert (
        "draft vocabulary: 4 of 96 tokens, 92.31% of the training data's" in capsys.readouterr().err
    )


def test_a_vocabulary_larger_than_the_bases_is_refused(fixtures_dir, data):
    base = str(fixtures_dir / "clover2_reference" / "base")
    settings = TrainSettings(base=base, data=data, seq_len=32, draft_vocab=97)
    with pytest.raises(UserError, match=r"--draft_vocab=97 must lie between 1 .* and 96, the base"):
        load_inputs(settings)
