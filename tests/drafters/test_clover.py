"""Clover against its equations, what its ablations leave, and bases of wide attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.clover2 import check_exportable
from clover_jax.drafters import registry
from clover_jax.drafters.attention_decoder import AttentionDecoder
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.drafters.tokens import extend, shift_left, window
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import DecoderLayer, causal_mask
from clover_jax.models.layers import rms_norm
from clover_jax.training.teacher import teach
from tests.foreign_heads import read_reference
from tests.tiny_models import TINY, init_head, lively_params, random_base, random_head

SIZE = 9


def train_forward(name, params, features, tokens, **changed):
    config = dataclasses.replace(random_head(name=name)[0].config, **changed)
    head = registry.head(config)
    positions = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
    frozen, ones = frozen_from_base(random_base()), jnp.ones_like(tokens)
    batch = Batch(tokens, ones, positions, ones > 0)
    forward = jax.jit(functools.partial(head.module.apply, method="train_forward"))
    return forward({"params": params}, frozen, features, batch, None)


def random_text(seed=0):
    keys = jax.random.split(jax.random.key(seed))
    features = 2 * jax.random.normal(keys[0], (2, SIZE, TINY.hidden_size))
    return features, jax.random.randint(keys[1], (2, SIZE), 0, TINY.vocab_size)


def silu(x):
    return x / (1 + np.exp(-x))


def normed(x, scale):
    return scale * x / np.sqrt((x * x).mean() + TINY.rms_norm_eps)


@pytest.mark.parametrize("num_heads", [TINY.num_heads, 16])
def test_clover_follows_its_equations_one_position_and_one_attention_head_after_another(num_heads):
    features, tokens = random_text()
    params = jax.tree.map(np.asarray, lively_params(name="clover"))
    decoder = params["regressive"]
    split = (num_heads, TINY.hidden_size // num_heads)
    decoder["query"] = decoder["query"].reshape(-1, *split)
    decoder["key_value"] = decoder["key_value"].reshape(-1, 2, *split)
    heads = 0 if num_heads == TINY.num_heads else num_heads
    found = train_forward("clover", params, features, tokens, decoder_heads=heads)
    positions, mask = jnp.arange(SIZE)[None].repeat(2, 0), causal_mask(2, SIZE)
    layer = {"params": params["augmenting_0"]}
    unit = params["state_size"] * rms_norm(features, jnp.ones(TINY.hidden_size), 0.0)
    z = np.asarray(jax.jit(DecoderLayer(TINY.head_layer).apply)(layer, unit, positions, mask)[0])
    frozen = frozen_from_base(random_base())
    lm_head = np.asarray(frozen.lm_head)
    for b, t in [(0, 0), (1, 3), (0, SIZE - 4)]:
        h = z[b, t]
        for i in range(3):
            e = lm_head[tokens[b, t + 1 + i]]
            e = e / np.linalg.norm(e)
            parts = []
            for n in range(num_heads):
                q = normed(h, decoder["norm"]["scale"]) @ decoder["query"][:, n]
                k, v = e @ decoder["key_value"][:, 0, n], e @ decoder["key_value"][:, 1, n]
                parts.append(q @ k / (np.linalg.norm(q) * np.linalg.norm(k)) * v)
            h = h + silu(np.concatenate(parts))
            u = h + silu(h @ params["heads"]["weight"][i] + params["heads"]["bias"][i])
            expected = normed(u, params["output_norm"]["scale"])
            np.testing.assert_allclose(found[i, b, t], expected, atol=1e-4)


def test_clover_without_its_three_parts_is_medusa_but_for_the_place_of_the_final_norm():
    features, tokens = random_text()
    params = lively_params(name="clover-bare")
    assert set(params) == {"heads", "output_norm", "state_size"}
    medusa, _ = random_head(name="medusa-shared")
    # Clover's three residual blocks, and the two more that Medusa has.
    blocks = {"heads": jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), params["heads"])}
    batch = Batch(tokens, tokens, tokens, tokens > 0)
    arguments = {"params": blocks}, None, features, batch, None
    positions = medusa.module.apply(*arguments, method="train_forward")
    bare = train_forward("clover-bare", params, features, tokens, unit_states=False)
    scale = params["output_norm"]["scale"]
    for i, u in enumerate(positions[:3]):
        np.testing.assert_allclose(bare[i], rms_norm(u, scale, TINY.rms_norm_eps), atol=1e-5)


def test_medusa_starts_as_the_base_itself():
    head, params = random_head(name="medusa")
    features, tokens = random_text()
    batch = Batch(tokens, tokens, tokens, tokens > 0)
    arguments = {"params": params}, None, features, batch, None
    hidden = head.module.apply(*arguments, method="train_forward")
    frozen = frozen_from_base(random_base())
    np.testing.assert_array_equal(hidden, jnp.broadcast_to(features, hidden.shape))
    for i in range(5):
        logits = head.module.apply({"params": params}, frozen, features, i, method="logits")
        np.testing.assert_allclose(logits, features @ frozen.lm_head.T, atol=1e-5)


def test_clover_starts_as_the_base_itself():
    features, tokens = random_text()
    params = random_head(name="clover")[1]
    found = train_forward("clover", params, features, tokens)
    expected = rms_norm(features, random_base()["final_norm"]["scale"], TINY.rms_norm_eps)
    np.testing.assert_allclose(found, jnp.broadcast_to(expected, found.shape), atol=2e-5)


def test_a_head_from_before_it_had_a_norm_of_its_own_starts_as_its_augmenting_block():
    features, tokens = random_text()
    config = registry.config_for_base("clover", TINY, unit_states=False, own_norm=False)
    params = init_head(registry.head(config), random_base(), jax.random.key(0))
    changed = {"unit_states": False, "own_norm": False}
    found = train_forward("clover", params, features, tokens, **changed)
    positions = jnp.arange(SIZE)[None].repeat(2, 0)
    layer = {"params": random_base()["layers_2"]}
    z, _ = DecoderLayer(TINY.head_layer).apply(layer, features, positions, causal_mask(2, SIZE))
    scale = random_base()["final_norm"]["scale"]
    expected = rms_norm(z, scale, TINY.rms_norm_eps)
    np.testing.assert_allclose(found, jnp.broadcast_to(expected, found.shape), atol=1e-5)


def test_an_attention_decoder_may_have_no_bias_and_its_silu_is_on_what_it_adds():
    x, e = 3 * random_text()[0]
    bare = AttentionDecoder(TINY.head_layer, bias=False).init(jax.random.key(0), x, e)["params"]
    assert set(bare) == {"norm", "query", "key_value"}
    params = AttentionDecoder(TINY.head_layer).init(jax.random.key(0), x, e)
    added = {
        silu_too: AttentionDecoder(TINY.head_layer, silu=silu_too).apply(params, x, e) - x
        for silu_too in (False, True)
    }
    assert added[False].min() < -0.5
    np.testing.assert_allclose(added[True], silu(np.asarray(added[False])), atol=1e-5)
    assert registry.config_for_base("clover", TINY).decoder_silu
    assert not registry.config_for_base("clover", TINY, decoder_silu=False).decoder_silu


CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def release(fixtures_dir):
    """The release's head and numbers, and a function that calls methods of the head."""
    base, draft, batch, expected = read_reference(fixtures_dir / "clover2_reference", "clover2")
    features = teach(base.config, base.params, draft.head.config.features, batch).features
    apply = functools.partial(draft.head.module.apply, {"params": draft.params})
    call = functools.partial(apply, frozen_from_base(base.params))
    return draft.head.config, batch, features, expected, call


def test_the_trunk_is_the_release_s(release):
    config, batch, features, expected, call = release
    assert (config.num_positions, config.num_augmenting_layers) == (5, 2)
    assert (config.loss.regression, config.loss.soft_ce, config.loss.decay) == (10.0, 1.0, 0.7)
    assert config.layer.rope.theta == 10_000.0
    shifted, mask = shift_left(batch.tokens, 1), causal_mask(*batch.tokens.shape)
    np.testing.assert_array_equal(shifted, expected["shifted_ids"])
    trunk, _ = call(features, shifted, batch.positions, mask, None, None, method="_trunk")
    np.testing.assert_allclose(trunk, expected["clover2_trunk"], **CLOSE)


def test_states_and_logits_are_the_release_s(release):
    _, batch, features, expected, call = release
    states = call(features, batch, None, method="train_forward")
    for position in range(5):
        # The reference pads the last `position` ones by zeros.
        valid = states.shape[2] - position
        found, wanted = states[position, :, :valid], expected["clover2_states"][position, :, :valid]
        np.testing.assert_allclose(found, wanted, **CLOSE)
        logits = call(found, position, method="logits")
        wanted = expected["clover2_logits"][position, :, :valid]
        np.testing.assert_allclose(logits, wanted, **CLOSE)


def test_shift_left_and_its_window_give_the_docstrings_examples():
    tokens = jnp.array([[5, 6, 7]])
    np.testing.assert_array_equal(shift_left(tokens, 1), [[6, 7, 0]])
    np.testing.assert_array_equal(window(extend(tokens, 2), 2, 3), shift_left(tokens, 2))


# 8 heads of 8 over a width of 32.
WIDE = dataclasses.replace(TINY, num_heads=8, num_kv_heads=4)


@pytest.mark.parametrize("kind", ["clover", "clover2"])
def test_a_head_splits_the_width_in_heads_of_the_bases_size(kind):
    head = registry.head(registry.config_for_base(kind, WIDE))
    params = init_head(head, random_base(WIDE), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    queries = [leaf for path, leaf in leaves if path[-1].key == "query"]
    assert queries
    for query in queries:
        assert query.shape[1:] == (4, 8)
        # The method's start: identity, and a little noise.
        np.testing.assert_allclose(query.reshape(32, 32), np.eye(32), atol=0.06)


def test_a_width_that_heads_do_not_fill_is_refused():
    odd = dataclasses.replace(TINY, hidden_size=36, head_dim=8)
    config = registry.config_for_base("clover2", odd)
    assert config.decoder_heads == 4
    with pytest.raises(ValueError, match=r"head_dim \(8\) does not divide: set decoder_heads.* 4"):
        dataclasses.replace(config, decoder_heads=0)
    # Nor can the official layout hold a head of such a base.
    config = registry.config_for_base("clover2", WIDE)
    with pytest.raises(UserError, match=r"width \(32\) in num_heads \(8\) parts, which is not"):
        check_exportable(config, WIDE)
