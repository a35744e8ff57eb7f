"""DFlash 2 gives the numbers of its public training code, and drafts what it trains."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.drafters import registry
from clover_jax.drafters.block_layer import _placed, _repeated
from clover_jax.drafters.dflash2 import feature_layers
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base
from clover_jax.training.losses import distillation_loss
from clover_jax.training.pairs import sample_anchors
from clover_jax.training.teacher import teach
from tests.foreign_heads import read_reference
from tests.tiny_models import TINY, random_base, random_head
from tests.training.training_data import random_batch

CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    base, draft, batch, expected = read_reference(fixtures_dir / "dflash2_reference", "dflash2")
    return base, draft.head, draft.params, batch, expected


def test_features_are_those_of_the_reference(reference):
    base, head, _, batch, expected = reference
    assert head.config.features == ("layer_2", "layer_4", "layer_6") == feature_layers(8, 3)
    features = teach(base.config, base.params, head.config.features, batch).features
    np.testing.assert_allclose(features, expected["features"], **CLOSE)


@pytest.fixture(scope="module")
def trained(reference):
    """The states of training at every position: [P, B, S, D + r]."""
    base, head, params, batch, expected = reference
    forward = jax.jit(functools.partial(head.module.apply, method="train_forward"))
    frozen = frozen_from_base(base.params)
    return forward({"params": params}, frozen, expected["features"], batch, None)


@pytest.mark.parametrize("anchor", [1, 7, 16])
def test_states_logits_and_pair_scores_of_training(reference, trained, anchor):
    base, head, params, _, expected = reference
    frozen, width = frozen_from_base(base.params), head.config.layer.hidden_size
    # A block belongs to the position before its anchor.
    hidden = jnp.moveaxis(trained[:, :, anchor - 1], 0, 1)
    wanted = {name: expected[f"block{anchor}_{name}"] for name in ("hidden", "logits")}
    np.testing.assert_allclose(hidden[..., :width], wanted["hidden"][:, 1:], **CLOSE)
    logits = head.module.apply({"params": params}, frozen, hidden, 0, method="logits")
    scores = head.module.apply({"params": params}, hidden, logits, method="rescore")
    np.testing.assert_allclose(logits, wanted["logits"], **CLOSE)
    candidates = expected[f"block{anchor}_candidates"]
    chosen = jnp.take_along_axis(scores, candidates, axis=-1)
    np.testing.assert_allclose(chosen, expected[f"block{anchor}_scores_true"], **CLOSE)
    assert np.isfinite(scores).sum(axis=-1).tolist() == [[8] * 5] * 2


GAMMA = 3  # of the reference


@pytest.fixture(scope="module")
def at_anchors(reference):
    """Return functions from params to the states at the reference's anchors and to their loss."""
    base, head, _, batch, expected = reference
    loss = dataclasses.replace(head.config.loss, decay=math.exp(-1 / GAMMA))
    head = registry.head(dataclasses.replace(head.config, loss=loss))
    frozen = frozen_from_base(base.params)
    anchored = batch.replace(anchors=jnp.asarray(expected["anchors"], jnp.int32))
    targets = teach(base.config, base.params, head.config.features, batch).states

    def states(params):
        return head.apply(params, "train_forward", frozen, expected["features"], anchored, None)

    def losses(params):
        # Three anchors a chunk and one row a group, so that there are several of both.
        how = {"chunk": 3, "groups": 2}
        return distillation_loss(head, params, frozen, states(params), targets, anchored, **how)

    return states, losses


def test_losses_at_anchors(reference, at_anchors):
    _, head, params, _, expected = reference
    loss, parts = jax.jit(at_anchors[1])(params)
    np.testing.assert_allclose(loss, expected["loss"], **CLOSE)
    base_loss = (np.exp(-np.arange(head.config.num_positions) / GAMMA) * parts.terms.hard_ce).sum()
    np.testing.assert_allclose(base_loss, expected["base_loss"], **CLOSE)
    np.testing.assert_allclose(loss - base_loss, expected["selector_loss"], **CLOSE)
    assert parts.pairs.sum() == expected["valid_tokens"]


def test_a_selector_that_never_has_the_true_token_among_its_candidates_has_no_loss():
    head, params = random_head(name="dflash2")
    head = registry.head(dataclasses.replace(head.config, candidates=1))
    batch = random_batch()
    frozen = frozen_from_base(random_base())
    hidden = jnp.ones((5, 3, 20, TINY.hidden_size + head.config.rank))
    never = int(frozen.lm_head.sum(axis=-1).argmin())
    batch = batch.replace(tokens=jnp.full_like(batch.tokens, never))

    def total(hidden):
        anchored = batch.replace(anchors=sample_anchors(jax.random.key(0), batch, 20))
        states = hidden[0, ..., : TINY.hidden_size]
        return distillation_loss(head, params, frozen, hidden, states, anchored, chunk=8)

    (loss, parts), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(hidden)
    assert parts.terms.candidate_ce.tolist() == [0] * 5
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradient).all()


def test_the_chunked_loss_has_the_gradient_of_plain_autodiff(reference, at_anchors):
    base, head, params, _, expected = reference
    states, losses = at_anchors
    lm_head, width = frozen_from_base(base.params).lm_head, head.config.layer.hidden_size
    place = expected["anchors"] + np.arange(1, 6)[:, None, None]  # [P, B, M]
    inside, rows = np.minimum(place, 23), np.arange(2)[:, None]
    label = expected["input_ids"][rows, inside]
    weight = np.exp(-np.arange(5) / GAMMA)[:, None, None] * (
        (place < 24) & (expected["loss_mask"][rows, inside] > 0)
    )

    def plain(params):
        u, pair = jnp.split(states(params), [width], axis=-1)
        logits = u @ lm_head.T
        best, candidates = jax.lax.top_k(logits, head.config.candidates)
        scores = best + jnp.einsum("pbmr,pbmkr->pbmk", pair, params["successor"][candidates])
        of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], axis=-1)
        is_label = candidates == label[..., None]
        chosen = jnp.where(is_label, jax.nn.log_softmax(scores), 0).sum(axis=-1)
        covered = (weight * is_label.any(axis=-1)).sum()
        return -(weight * of_label[..., 0]).sum() / weight.sum() - (weight * chosen).sum() / covered

    value, wanted = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(value, expected["loss"], **CLOSE)
    found = jax.jit(jax.grad(lambda params: losses(params)[0]))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), found, wanted)


@pytest.mark.parametrize("anchor", [1, 7, 16])
def test_candidates_walk_and_pair_scores_of_drafting(reference, anchor):
    base, head, params, _, expected = reference
    tokens, features = (jnp.asarray(expected[name]) for name in ("input_ids", "features"))
    apply = functools.partial(head.module.apply, {"params": params}, frozen_from_base(base.params))

    # The context comes in two pieces, the second one with positions that are not valid.
    cache, start = head.module.init_cache(2, 32, jnp.float32), jnp.zeros(2, jnp.int32)
    for begin, end, size in [(0, anchor // 2, anchor // 2), (anchor // 2, anchor, 9)]:
        if size:
            read = features[:, begin : begin + size]
            following = tokens[:, begin + 1 : begin + 1 + size]
            counts = start + begin, start + end - begin
            accepted = AcceptedPositions(read, following, *counts, tokens)
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


def test_a_tpu_spreads_the_same_kernel_over_the_channels_in_its_own_way():
    kernel = jax.random.normal(jax.random.key(0), (2, 3, 4))
    assert (_placed(kernel, 12) == _repeated(kernel, 12)).all()
    assert _repeated(jnp.array([1, 2]), 4).tolist() == [1, 1, 2, 2]


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
    cache = module.init_cache(1, 8, jnp.float32)
    states = [
        each.apply({"params": own}, frozen, accepted, cache, method="absorb")[0]
        for each, own in ((head.module, params), (module, plain))
    ]
    np.testing.assert_array_equal(states[0].ids, states[1].ids)
    np.testing.assert_array_equal(states[0].logits, states[1].logits)
    proposal = module.apply({"params": plain}, frozen, states[1], 2, method="propose")
    assert proposal.ids.shape == (1, 1, 3)


def test_what_it_reads_of_a_base():
    assert feature_layers(36, 5) == tuple(f"layer_{i}" for i in (2, 10, 18, 26, 34))
    assert feature_layers(32, 1) == ("layer_17",)
    assert feature_layers(3, 2) == ("layer_1", "pre_norm")
    assert feature_layers(1, 1) == ("pre_norm",)
