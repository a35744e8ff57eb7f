"""The head that the flags describe: its options, its loss, its vocabulary."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.config import LossSpec
from clover_jax.data.records import TokenRow
from clover_jax.data.samples import Reading, RecordSamples
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_inputs, make_head, most_frequent, reduce_vocabulary
from tests.tiny_models import TINY, random_head


@pytest.fixture
def base(tmp_path):
    return BaseModel(config=TINY, params={}, directory=tmp_path, source="tiny")


def config_of(base, **settings):
    return make_head(TrainSettings(**settings), base).config


@pytest.mark.parametrize(
    "text, kind, options",
    [
        (  # of the docstring
            *("order=block_first,output_projector=false", "clover2"),
            {"order": "block_first", "output_projector": False},
        ),
        (
            *(" num_positions=4, regressive_block=mlp,", "clover"),
            {"num_positions": 4, "regressive_block": "mlp"},
        ),
        ("", "clover", {}),
    ],
)
def test_options_have_the_types_that_the_kind_declares(text, kind, options):
    assert registry.parse_options("--drafter_options=", text, kind) == options


@pytest.mark.parametrize(
    "text, kind, message",
    [
        ("depth=3", "medusa", "a medusa head has no option 'depth'; the options are num_posi"),
        ("rope=1", "clover", "a clover head has no option 'rope'; the options are num_positions=I"),
        ("own_output", "medusa", "'own_output' is not written name=value"),
        ("own_output=1", "medusa", "own_output must be true or false, not '1'"),
        ("num_positions=two", "clover", "num_positions must be int, not 'two'"),
        ("order=a,order=b", "clover2", "order is given twice"),
    ],
)
def test_a_mistake_is_answered_with_the_options(text, kind, message):
    with pytest.raises(UserError, match=f"--drafter_options={text}: {message}"):
        registry.parse_options("--drafter_options=", text, kind)


def test_flags_and_options_make_the_head(base):
    flags = {"drafter_options": "regressive_block=none", "loss": "hard_ce=0.5,soft_ce=0.25"}
    sizes = {"num_augmenting_layers": 0, "num_positions": 2}
    config = config_of(base, drafter="clover", **flags, **sizes)
    assert (config.regressive_block, config.num_augmenting_layers) == ("none", 0)
    assert (config.num_positions, config.max_depth) == (2, 2)
    assert (config.loss.soft_ce, config.loss.hard_ce, config.loss.decay) == (0.25, 0.5, 0.8)


def test_one_flag_sets_any_part_of_the_loss_and_leaves_the_others(base):
    parts = "hard_ce=1,soft_ce=0,dpace=0.25,divisor=positions"
    loss = config_of(base, drafter="clover_lr", loss=parts).loss
    assert (loss.hard_ce, loss.soft_ce, loss.dpace, loss.divisor) == (1.0, 0.0, 0.25, "positions")
    assert (loss.regression, loss.total_variation, loss.decay) == (1.0, 2.0, 0.8)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"drafter": "medusa", "num_augmenting_layers": 1},
         "--drafter=medusa: a medusa head has no option num_augmenting_layers; its options: num"),
        ({"drafter": "medusa", "draft_rope_theta": 1e4}, "--drafter=medusa: .* no option rope;"),
        ({"num_positions": 3, "drafter_options": "num_positions=4"},
         "give --num_positions or num_positions in --drafter_options, not both"),
        ({"loss": "kl=1"}, "--loss=kl=1: the loss has no part 'kl'; the options are regression=F"),
        ({"loss": "hard_ce=1,dpace=2"}, r"=hard_ce=1,dpace=2: loss dpace \(2.0\) must lie in 0 "),
        ({"loss": "lk=1"}, "--loss=lk=1: the loss has no part 'lk'"),
        ({"loss": "soft_ce=-1"}, r"loss soft_ce \(-1.0\) must be at least 0, and finite"),
        ({"loss": "decay=nan"}, r"--loss=decay=nan: loss decay \(nan\) must be at least 0"),
        ({"drafter": "eagle", "drafter_options": "feature_noise=nan"},
         r"feature_noise \(nan\) must be at least 0, and finite"),
        ({"drafter": "clover_lr", "loss": "decay=0.3"},
         r"--loss=decay=0.3: decay \(0.3\) has no effect with dpace \(0.5\); add dpace=0"),
        ({"drafter": "clover", "drafter_options": "regressive_block=x"}, "'x' is not one of"),
        ({"num_augmenting_layers": 0}, r"num_augmenting_layers \(0\) must be at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_the_head_cannot_take_is_refused(base, settings, message):
    with pytest.raises(UserError, match=message):
        config_of(base, **settings)


def test_a_theta_without_rotation_is_refused(base):
    base = dataclasses.replace(base, config=dataclasses.replace(TINY, alibi=True))
    with pytest.raises(UserError, match="--draft_rope_theta: this base has ALiBi, and no rotation"):
        config_of(base, draft_rope_theta=1e4)


def test_a_loss_and_settings_of_an_earlier_version_are_read_but_for_dropped_terms():
    unused = {"neg_log_acceptance": 0.0, "lk": 0.0, "lk_eta": 3.0, "label_mask": False}
    assert LossSpec.from_dict({"soft_ce": 2.0} | unused) == LossSpec(soft_ce=2.0)
    with pytest.raises(ValueError, match=r"loss lk \(1.0\) was dropped from training; set it to 0"):
        LossSpec.from_dict(unused | {"lk": 1.0})
    with pytest.raises(ValueError, match="LossSpec has no field 'kl'"):
        LossSpec.from_dict({"kl": 0.0})
    earlier = {"loss": "dpace=0.5", "regression_weight": 1.0, "position_decay": None}
    assert TrainSettings.from_dict(earlier).loss == "dpace=0.5,regression=1"
    assert TrainSettings.from_dict({"label_mask": False, "soft_ce_weight": None}).loss is None
    with pytest.raises(ValueError, match="label_mask was dropped"):
        TrainSettings.from_dict({"label_mask": True})


def test_only_what_the_base_is_imitated_on_is_counted():
    config = dataclasses.replace(TINY, eos_token_ids=())
    records = [TokenRow("a", (1, 2), (3, 3, 4)), TokenRow("b", (3,), (0,))]
    samples = RecordSamples(records, Reading(None, config.vocab_size, 32))
    head, _ = random_head(config, "medusa")
    base = BaseModel(config, {}, Path(), "random")
    for size, ids, coverage in ((1, (3,), 2 / 4), (2, (0, 3), 3 / 4), (4, (0, 1, 3, 4), 1)):
        reduced, share = reduce_vocabulary(head, size, base, None, samples)
        assert (reduced.config.draft_to_target, share) == (ids, coverage)


def test_equally_frequent_tokens_come_in_order_none_twice_and_as_many_as_there_can_be():
    assert most_frequent(np.array([5, 0, 3, 0, 9]), 3, [1]) == ((0, 1, 4), 14 / 17)
    assert most_frequent(np.array([1, 2, 2, 2]), 2, [2, 2])[0] == (1, 2)
    assert most_frequent(np.array([0, 0, 0]), 3)[0] == (0, 1, 2)
    assert most_frequent(np.array([0, 0]), 1)[1] == 0.0
    for size in (2, 6):
        message = rf"--draft_vocab={size} must lie between 3 \(the special tokens\) and 5, the base"
        with pytest.raises(UserError, match=message):
            most_frequent(np.ones(5, np.int64), size, [0, 3, 4])


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
    said = "draft vocabulary: 4 of 96 tokens, 92.31% of the training data's"
    assert said in capsys.readouterr().err
