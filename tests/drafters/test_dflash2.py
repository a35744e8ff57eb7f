"""DFlash 2 gives the numbers of its public training code, and drafts what it trains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.drafters import registry
from clover_jax.drafters.dflash2 import feature_layers
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base
from clover_jax.interchange.directory import load_draft
from clover_jax.models.batch import Batch
from clover_jax.pretrained.loading import load_base
from clover_jax.training.teacher import teach
from tests.tiny_models import TINY, random_base, random_head

CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    folder = fixtures_dir / "dflash2_reference"
    base = load_base(str(folder / "base"))
    draft = load_draft(folder / "dflash2", base)
    return base, draft.head, draft.params, np.load(folder / "expected.npz")


@pytest.fixture(scope="module")
def batch(reference):
    expected = reference[-1]
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    return Batch(
        tokens=tokens,
        segment_ids=jnp.ones_like(tokens),
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        loss_mask=jnp.asarray(expected["loss_mask"] > 0),
    )


def test_features_are_those_of_the_reference(reference, batch):
    base, head, _, expected = reference
    assert head.config.features == ("layer_2", "layer_4", "layer_6") == feature_layers(8, 3)
    features = teach(base.config, base.params, head.config.features, batch).features
    np.testing.assert_allclose(features, expected["features"], **CLOSE)


@pytest.mark.parametrize("anchor", [1, 7, 16])
def test_states_logits_and_pair_scores_of_training(reference, batch, anchor):
    base, head, params, expected = reference
    frozen, width = frozen_from_base(base.params), head.config.layer.hidden_size
    apply = functools.partial(head.module.apply, {"params": params}, frozen)
    hidden = apply(expected["features"], batch, None, method="train_forward")
    # A block belongs to the position before its anchor.
    hidden = jnp.moveaxis(hidden[:, :, anchor - 1], 0, 1)
    wanted = {name: expected[f"block{anchor}_{name}"] for name in ("hidden", "logits")}
    np.testing.assert_allclose(hidden[..., :width], wanted["hidden"][:, 1:], **CLOSE)
    scores = apply(hidden, 0, method="logits")
    logits = apply(hidden.at[..., width:].set(0), 0, method="logits")
    np.testing.assert_allclose(logits, wanted["logits"], **CLOSE)
    candidates = expected[f"block{anchor}_candidates"]
    chosen = jnp.take_along_axis(scores, candidates, axis=-1)
    np.testing.assert_allclose(chosen, expected[f"block{anchor}_scores_true"], **CLOSE)


@pytest.mark.parametrize("anchor", [1, 7, 16])
def test_candidates_walk_and_pair_scores_of_drafting(reference, anchor):
    base, head, params, expected = reference
    tokens, features = (jnp.asarray(expected[name]) for name in ("input_ids", "features"))
    apply = functools.partial(head.module.apply, {"params": params}, frozen_from_base(base.params))

    # The context comes in two pieces, the second one with positions that are not valid.
    cache, start = head.module.init_cache(2, 32, jnp.float32), jnp.zeros(2, jnp.int32)
    for begin, end, size in [(0, anchor // 2, anchor // 2), (anchor // 2, anchor, 9)]:
        if size:
            read, following = (
                x[:, i : i + size] for x, i in ((features, begin), (tokens, begin + 1))
            )
            accepted = AcceptedPositions(
                read, following, start + begin, start + end - begin, tokens
            )
            state, cache = apply(accepted, cache, method="absorb")
    np.testing.assert_array_equal(state.ids, expected[f"block{anchor}_candidates"])

    # The greedy walk, and beside it the text, as two branches of the same block.
    parent = jnp.zeros((2, 2), jnp.int32)
    for depth in range(head.config.num_positions):
        proposal = apply(state, depth, method="propose")
        best, in_text = proposal.ids[:, 0, 0], tokens[:, anchor + 1 + depth]
        np.testing.assert_array_equal(best, expected[f"block{anchor}_path"][:, depth])
        scores = jax.nn.log_softmax(expected[f"block{anchor}_scores_true"][:, depth])
        order = np.argsort(-scores, axis=-1)
        last = {name: getattr(proposal, name)[:, -1] for name in ("ids", "log_probability")}
        ids = np.take_along_axis(expected[f"block{anchor}_candidates"][:, depth], order, axis=-1)
        np.testing.assert_array_equal(last["ids"], ids)
        wanted = np.take_along_axis(scores, order, axis=-1)
        np.testing.assert_allclose(last["log_probability"], wanted, **CLOSE)
        token = jnp.stack([best, in_text], axis=1)
        state = apply(state, cache, parent, token, depth + 1, method="advance")


def test_without_selector_and_convolution_all_branches_have_the_same_candidates():
    head, params = random_head(name="dflash2")
    config = dataclasses.replace(head.config, rank=0, conv_taps=0)
    module, kept = registry.head(config).module, {"context_norm", "fc", "layers_0", "norm"}
    plain = {name: params[name] for name in kept}
    plain["layers_0"] = {k: v for k, v in plain["layers_0"].items() if not k.endswith("conv")}

    # Convolutions and the selector begin at nothing, so that this is the same head.
    frozen, features = frozen_from_base(random_base()), jnp.ones((1, 4, len(config.features) * 32))
    start, tokens = jnp.zeros(1, jnp.int32), jnp.arange(4)[None]
    accepted = AcceptedPositions(features, tokens, start, start + 4, tokens)
    states = [
        each.apply(
            {"params": own}, frozen, accepted, each.init_cache(1, 8, jnp.float32), method="absorb"
        )[0]
        for each, own in ((head.module, params), (module, plain))
    ]
    np.testing.assert_array_equal(states[0].ids, states[1].ids)
    np.testing.assert_array_equal(states[0].logits, states[1].logits)
    proposal = module.apply({"params": plain}, frozen, states[1], 2, method="propose")
    assert proposal.ids.shape == (1, 1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_positions": 0}, r"num_positions \(0\), num_layers \(3\)"),
        ({"mask_token_id": 96}, r"mask_token_id \(96\) must lie in 0 .. 95"),
        ({"candidates": 0}, r"candidates \(0\) 1"),
        ({"conv_group": 5}, r"conv_group \(5\) divide hidden_size \(32\)"),
    ],
)
def test_impossible_heads_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        registry.config_for_base("dflash2", TINY, **options)


@pytest.mark.parametrize(
    ("num_layers", "count", "names"),
    [
        (36, 5, ("layer_2", "layer_10", "layer_18", "layer_26", "layer_34")),
        (32, 1, ("layer_17",)),
        (3, 2, ("layer_1", "pre_norm")),
        (1, 1, ("pre_norm",)),
    ],
)
def test_what_it_reads_of_a_base(num_layers, count, names):
    assert feature_layers(num_layers, count) == names
