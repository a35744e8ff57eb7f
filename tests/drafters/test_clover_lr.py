"""Clover-LR and Clover-Copy: start, correction, pointers, options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.drafters.augmenting import from_last_layer
from clover_jax.drafters.clover_copy import from_columns, mix, to_columns
from clover_jax.drafters.drafter import (
    PAD_TOKEN,
    AcceptedPositions,
    frozen_from_base,
    with_draft_rows,
)
from clover_jax.models.batch import Batch
from clover_jax.training.teacher import teach
from tests.tiny_models import TINY, lively_params, random_base, random_head
from tests.training.training_data import random_batch


def head_with(**changes):
    config = random_head(name="clover_lr")[0].config
    return registry.head(dataclasses.replace(config, **changes))


def hidden_states(head, params, batch):
    """Return what training sees."""
    base_params = with_draft_rows(random_base(), head.config)
    features = teach(TINY, base_params, head.config.features, batch).features
    arguments = {"params": params}, frozen_from_base(base_params), features, batch, None
    return head.module.apply(*arguments, method="train_forward")


def test_it_begins_without_a_correction_and_with_the_last_state_alone():
    head, params = random_head(name="clover_lr")
    hidden = hidden_states(head, params, random_batch())
    width = TINY.hidden_size
    assert not hidden[..., width:].any()
    assert not params["fuse"].any()
    only_last = head_with(features=("pre_norm",))
    fewer = {name: leaf for name, leaf in params.items() if name != "fuse"}
    alone = hidden_states(only_last, fewer, random_batch())
    np.testing.assert_allclose(hidden, alone, atol=1e-6)


def test_the_size_of_states_and_rows_means_nothing():
    head, params, batch = head_with(), lively_params(name="clover_lr"), random_batch()
    teacher = teach(TINY, random_base(), head.config.features, batch)
    frozen = frozen_from_base(random_base())

    def hidden(features, lm_head):
        module, weights = head.module, frozen.replace(lm_head=lm_head)
        inputs = (weights, features, batch, None)
        return module.apply({"params": params}, *inputs, method="train_forward")

    found = hidden(teacher.features, frozen.lm_head)
    for features, scale in ((7 * teacher.features, 1), (teacher.features, 7)):
        other = hidden(features, scale * frozen.lm_head)
        np.testing.assert_allclose(other, found, atol=1e-3)


@pytest.mark.parametrize(("revision", "named"), [({}, 1), ({"revision": 3}, 3)])
def test_a_head_of_other_equations_is_refused(revision, named):
    values = random_head(name="clover_lr")[0].config.to_dict()
    del values["revision"]
    with pytest.raises(ValueError, match=f"Clover-LR head of revision {named}, .*: train it again"):
        registry.config_from_dict(values | revision)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 33}, r"rank \(33\) must lie between 0 and hidden_size \(32\)"),
        ({"features": ("pre_norm", "layer_1")}, "the last of the features .* must be pre_norm"),
        ({"max_depth": 9}, r"max_depth \(9\) must be num_positions \(5\)"),
    ],
)
def test_impossible_heads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        head_with(loss=LossSpec(), **changes)


def test_the_trunk_begins_as_the_last_layers_one_each():
    base, (head, params) = random_base(), random_head(name="clover_lr")
    for mine, theirs in (("augmenting_0", "layers_1"), ("augmenting_1", "layers_2")):
        # The matrices that write are zero, so that the state passes on.
        expected = base[theirs] | {
            "attention": base[theirs]["attention"] | {"out": 0 * base[theirs]["attention"]["out"]},
            "mlp": base[theirs]["mlp"] | {"down": 0 * base[theirs]["mlp"]["down"]},
        }
        jax.tree.map(np.testing.assert_array_equal, params[mine], expected)
    shallow = {name: base[name] for name in ("layers_0", "layers_1")}
    layers = from_last_layer(head.config, shallow, 3, in_order=True)
    expected = ("layers_0", "layers_0", "layers_1")
    assert all(layers[f"augmenting_{i}"] is base[name] for i, name in enumerate(expected))


def test_a_shallow_base_gives_each_of_its_states_once_and_no_more_can_be_asked_for():
    shallow = dataclasses.replace(TINY, num_layers=2)
    config = registry.config_for_base("clover_lr", shallow)
    assert config.features == ("layer_1", "pre_norm")
    for count in (0, -3, TINY.num_layers + 1):
        message = rf"num_features \({count}\) must lie between 1 and .* 3"
        with pytest.raises(ValueError, match=message):
            registry.config_for_base("clover_lr", TINY, num_features=count)


def batch_of(tokens, segment_ids=None):
    tokens = jnp.asarray(tokens)[None]
    ones = jnp.ones_like(tokens)
    segment_ids = ones if segment_ids is None else jnp.asarray(segment_ids)[None]
    return Batch(tokens, segment_ids, jnp.arange(tokens.shape[1])[None], ones > 0)


def copies():
    return random_head(name="clover_copy")[0]


@functools.cache
def compiled(method, *depth):
    apply = copies().module.apply
    return jax.jit(lambda params, *x: apply({"params": params}, *x, *depth, method=method))


def features_of(tokens):
    """Return states that differ at every position."""
    width = TINY.hidden_size * len(copies().config.features)
    return jax.random.normal(jax.random.key(1), (1, len(tokens), width))


def trained(params, tokens, segment_ids=None):
    """Return what training hands to `logits`: [P, S, D + r + 4K]."""
    batch = batch_of(tokens, segment_ids)
    inputs = (frozen_from_base(random_base()), features_of(tokens), batch, None)
    return compiled("train_forward")(params, *inputs)[:, 0]


def drafted_root(params, tokens, last):
    """Return the state of a text that was absorbed up to `last`, whose next token is known."""
    text = jnp.where(jnp.arange(len(tokens)) <= last + 1, jnp.asarray(tokens), PAD_TOKEN)[None]
    start, count = jnp.zeros(1, jnp.int32), jnp.full(1, last + 1)
    following = jnp.roll(text, -1, axis=1)
    accepted = AcceptedPositions(features_of(tokens), following, start, count, text)
    cache = copies().module.init_cache(1, len(tokens), jnp.float32)
    return compiled("absorb")(params, frozen_from_base(random_base()), accepted, cache)


def test_a_fresh_head_points_after_the_longest_and_newest_match_and_goes_round():
    params = random_head(name="clover_copy")[1]
    #        0  1  2  3  4  5  6  7  8  9 10 11
    text = [1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3, 9, 9, 9]
    state, _ = drafted_root(params, text, last=10)  # known up to 3 at place 11
    pointers = state.pointers
    np.testing.assert_array_equal(pointers.length[0, 0, :2], [3, 3])
    # After the text's end the newer one goes on as the loop 5 6 1 2 3 would.
    np.testing.assert_array_equal(pointers.ahead[0, 0, :2], [[5, 6, 1, 2, 3], [4, 1, 2, 3, 5]])


@pytest.mark.parametrize("last", [5, 16])
def test_drafting_a_looping_text_gives_the_logits_of_training(last):
    tokens = [7, 1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3, 3, 3]
    params, frozen = lively_params(name="clover_copy"), frozen_from_base(random_base())
    hidden = trained(params, tokens)
    state, cache = drafted_root(params, tokens, last)
    for depth in range(copies().config.num_positions):
        found = compiled("propose", depth)(params, frozen, state)
        expected = compiled("logits", depth)(params, frozen, hidden[depth, last])
        np.testing.assert_allclose(found[0, 0], expected, atol=1e-4, err_msg=f"depth {depth}")
        token = jnp.asarray([[tokens[last + 2 + depth]]])
        arguments = (frozen, state, cache, jnp.zeros((1, 1), jnp.int32), token)
        state = compiled("advance", depth + 1)(params, *arguments)


def test_copies_come_from_the_same_document_and_from_what_is_known():
    params = lively_params(name="clover_copy")
    tokens, other = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], [5, 6, 5, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    segment_ids = [1, 1, 1, *[2] * 9]

    def proposed(tokens):
        """Return the logits of position 0, in which pointers to nothing do not show."""
        frozen, hidden = frozen_from_base(random_base()), trained(params, tokens, segment_ids)[0]
        return compiled("logits", 0)(params, frozen, hidden)

    found = proposed(tokens)
    np.testing.assert_allclose(found[3:], proposed(other)[3:], atol=1e-5)
    # What comes later tells nothing.
    np.testing.assert_allclose(found[:8], proposed([*tokens[:9], 8, 8, 8])[:8], atol=1e-5)


def test_mixing_adds_probabilities():
    rng = np.random.default_rng(0)
    logits, odds = rng.normal(size=(2, 10)), rng.normal(size=(2, 4))
    tokens = np.array([[3, 7, 3, PAD_TOKEN], [2, 2, 2, 0]])
    q = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for row, (ids, each) in enumerate(zip(tokens, np.exp(odds), strict=True)):
        for token, odd in zip(ids, each, strict=True):
            q[row, token] += odd if token >= 0 else 0
    mixed = jax.nn.softmax(mix(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(odds)))
    np.testing.assert_allclose(mixed, q / q.sum(axis=-1, keepdims=True), rtol=1e-4)


def test_tokens_pass_through_bfloat16():
    tokens = jnp.asarray([[0, 255, 256, 128_255, 151_643]])
    np.testing.assert_array_equal(from_columns(to_columns(tokens, jnp.bfloat16)), tokens)
    assert int(from_columns(to_columns(jnp.asarray([PAD_TOKEN]), jnp.bfloat16))[0]) == 2**24 - 1


def test_a_pointer_that_is_none_is_refused():
    for name in ("pointers", "pointer_rank"):
        message = "must be at least 1: clover_lr is the head that copies"
        with pytest.raises(ValueError, match=message):
            registry.config_for_base("clover_copy", TINY, **{name: 0})
