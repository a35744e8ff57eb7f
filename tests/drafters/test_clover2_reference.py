"""Clover-2 gives the numbers of the authors' release: trunk, states and logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.drafters.drafter import frozen_from_base, select_features
from clover_jax.drafters.tokens import shift_left
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, causal_mask

CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def expected(fixtures_dir):
    return np.load(fixtures_dir / "clover2_reference" / "expected.npz")


@pytest.fixture(scope="module")
def base(fixtures_dir):
    return load_base(str(fixtures_dir / "clover2_reference" / "base"))


@pytest.fixture(scope="module")
def draft(fixtures_dir, base):
    return load_draft(fixtures_dir / "clover2_reference" / "clover2", base)


@pytest.fixture(scope="module")
def ids(expected):
    return jnp.asarray(expected["input_ids"], jnp.int32)


@pytest.fixture(scope="module")
def positions(ids):
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


@pytest.fixture(scope="module")
def features(base, draft, ids, positions):
    """What our own base gives the head to read."""
    mask = causal_mask(*ids.shape)
    hidden = Decoder(base.config).apply({"params": base.params}, ids, positions, mask).hidden
    return select_features(hidden, draft.head.config.features)


@pytest.fixture(scope="module")
def states(base, draft, features, ids, positions):
    """u^i at every position, [P, B, S, D]."""
    frozen, segments = frozen_from_base(base.params), jnp.ones_like(ids)
    arguments = (frozen, features, Batch(ids, segments, positions, segments > 0), None)
    return draft.head.module.apply({"params": draft.params}, *arguments, method="train_forward")


def test_the_config_is_the_release_s(draft):
    config = draft.head.config
    assert (config.num_positions, config.num_augmenting_layers) == (5, 2)
    assert (config.loss.regression, config.loss.soft_ce, config.loss.decay) == (10.0, 1.0, 0.7)
    assert config.layer.rope.theta == 10_000.0


def test_shifted_tokens(expected, ids):
    np.testing.assert_array_equal(shift_left(ids, 1), expected["shifted_ids"])


def test_trunk(base, draft, features, ids, positions, expected):
    arguments = (features, shift_left(ids, 1), positions, causal_mask(*ids.shape), None, None)
    trunk, _ = draft.head.module.apply(
        {"params": draft.params}, frozen_from_base(base.params), *arguments, method="_trunk"
    )
    np.testing.assert_allclose(trunk, expected["clover2_trunk"], **CLOSE)


@pytest.mark.parametrize("position", range(5))
def test_states_and_logits(position, base, draft, states, expected):
    valid = states.shape[2] - position  # the reference pads the last `position` ones by zeros
    found = states[position, :, :valid]
    np.testing.assert_allclose(found, expected["clover2_states"][position, :, :valid], **CLOSE)
    logits = draft.head.module.apply(
        {"params": draft.params}, frozen_from_base(base.params), found, position, method="logits"
    )
    np.testing.assert_allclose(logits, expected["clover2_logits"][position, :, :valid], **CLOSE)
