"""EAGLE-1 gives the numbers of the authors' code; its noise, its loss, its files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import frozen_from_base, select_features
from clover_jax.drafters.eagle import noise_like
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, causal_mask
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import make_head
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, head_loss
from clover_jax.training.teacher import teach
from tests import tiny_checkpoints
from tests.layer_heads import lively_head
from tests.tiny_models import TINY, random_base
from tests.training.training_data import random_batch


def test_states_are_those_of_the_release(fixtures_dir):
    reference = fixtures_dir / "clover2_reference"
    expected = np.load(reference / "expected.npz")
    base = load_base(str(reference / "base"))
    draft = load_draft(reference / "eagle1", base)
    ids = jnp.asarray(expected["input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = (
        Decoder(base.config)
        .apply({"params": base.params}, ids, positions, causal_mask(*ids.shape))
        .hidden
    )
    features = select_features(hidden, draft.head.config.features)
    batch = Batch(ids, jnp.ones_like(ids), positions, ids >= 0)
    arguments = (frozen_from_base(base.params), features, batch, None)
    states = draft.head.module.apply({"params": draft.params}, *arguments, method="train_forward")
    np.testing.assert_allclose(states[0], expected["eagle1_states"], atol=1e-4, rtol=0)


def test_noise_is_uniform_and_wider_in_shorter_sequences():
    segment_ids = jnp.array([[1] * 40 + [2] * 8 + [0] * 2])
    noise = noise_like(jnp.zeros((1, 50, 4000)), segment_ids, jax.random.key(0), 0.1)
    for part, length in ((slice(0, 40), 40), (slice(40, 48), 8)):
        bound = 0.1 * 512 / length
        values = np.asarray(noise[0, part])
        assert np.abs(values).max() <= bound
        np.testing.assert_allclose(values.std(), bound / 3**0.5, rtol=0.02)
        np.testing.assert_allclose(values.mean(), 0, atol=0.02 * bound)


def loss_of(head, params, batch, key=None):
    teacher = teach(TINY, random_base(), head.config.features, batch)
    config = TrainStepConfig(TINY, head, OptimizerConfig(steps=1, warmup_steps=0), 16)
    key = jax.random.key(0) if key is None else key
    return head_loss(config, params, random_base(), teacher, batch, key)[0]


def test_training_is_noisy_and_repeatable():
    head, params = lively_head("eagle")
    value = jax.jit(lambda key: loss_of(head, params, random_batch(), key))
    loss = value(jax.random.key(0))
    assert value(jax.random.key(0)) == loss
    assert value(jax.random.key(1)) != loss


def test_the_loss_is_divided_by_the_pairs_alone():
    head, params = lively_head("eagle")
    quiet = registry.head(dataclasses.replace(head.config, feature_noise=0.0))
    once, twice = random_batch(rows=1), random_batch(rows=1)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), twice)
    value = jax.jit(lambda batch: loss_of(quiet, params, batch))
    loss = value(once)
    np.testing.assert_allclose(loss, value(twice), rtol=1e-5)
    assert loss > 0.1


def test_the_rotary_base_is_the_base_models_unless_given(tmp_path):
    config = dataclasses.replace(TINY, rope=RopeConfig(theta=5e5))
    base = tiny_checkpoints.random_base(tmp_path, config)
    head = make_head(TrainSettings(drafter="eagle"), base)
    assert head.config.layer.rope.theta == 5e5
    head = make_head(TrainSettings(drafter="eagle", draft_rope_theta=1e4), base)
    assert head.config.layer.rope.theta == 1e4


def test_one_position_is_trained(tmp_path):
    base = tiny_checkpoints.random_base(tmp_path)
    with pytest.raises(UserError, match=r"num_positions \(5\) must be 1"):
        make_head(TrainSettings(drafter="eagle", num_positions=5), base)
