"""Training on the activations of a prepared folder."""

import json
import threading

import numpy as np
import pytest

from clover_jax.errors import UserError
from clover_jax.training.run import run_training
from experiments.tiny_base.base_folder import save_base
from tests.prepare.prepared_data import SEQ_LEN, load
from tests.tiny_folders import SPEAKING
from tests.tiny_models import random_base
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_level
from tests.training.conftest import losses_of, settings

# Few steps show in the regression first; with D-PACE the weights grow as the head learns.
LOSS = {"loss": "regression=10,dpace=0"}
SIZES = {"steps": 50, "seq_len": SEQ_LEN, "warmup_steps": 10, "checkpoint_every": 0} | LOSS


def test_a_cached_teacher_gives_the_loss_curve_of_an_online_one(base, data, prepared, tmp_path):
    run_training(settings(data, base=str(base), **SIZES), tmp_path / "online", threading.Event())
    cached = settings(prepared, base=str(base), teacher="cached", **SIZES)
    run_training(cached, tmp_path / "cached", threading.Event())
    curves = losses_of(tmp_path / "online"), losses_of(tmp_path / "cached")
    assert len(curves[0]) == 50
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert curves[0][-1] < curves[0][0] - 1
    card = json.loads((tmp_path / "online" / "draft" / "draft.json").read_text())
    assert card["chat_template"] == CHAT_TEMPLATE


@pytest.fixture
def other_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    folder.mkdir()
    save_byte_level(folder, CHAT_TEMPLATE)
    save_base(folder, SPEAKING, random_base(SPEAKING, seed=7))
    return folder


def test_activations_of_another_base_are_refused_with_both_hashes(other_base, prepared, tmp_path):
    cached = settings(prepared, base=str(other_base), teacher="cached", **SIZES)
    with pytest.raises(UserError, match=r"of another base than .*lm_head \w{12} against \w{12}"):
        run_training(cached, tmp_path, threading.Event())


def test_activations_that_the_head_reads_are_loaded(base, prepared):
    data = load(prepared, base, ("pre_norm",))
    assert data.samples.hidden(0)["pre_norm"].dtype == np.float32
    assert not data.tokens_only.hidden_names


def test_activations_that_the_head_reads_must_be_there(base, prepared):
    message = "has the activations pre_norm, but not layer_1, post_norm"
    with pytest.raises(UserError, match=message):
        load(prepared, base, ("layer_1", "post_norm"))


def test_a_cached_teacher_needs_a_prepared_folder(base, data):
    with pytest.raises(UserError, match="has no cached activations; make them with `prepare"):
        load(data, base, ("pre_norm",))
