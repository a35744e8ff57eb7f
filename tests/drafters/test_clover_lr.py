"""Clover-LR: its start, its correction, its training on drafted tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.drafters.augmenting import from_last_layer
from clover_jax.drafters.drafter import frozen_from_base, with_draft_rows
from clover_jax.training.optimizer import OptimizerConfig
from clover_jax.training.step import TrainStepConfig, head_loss
from clover_jax.training.teacher import teach
from tests.tiny_models import TINY, lively_params, random_base, random_head
from tests.training.training_data import random_batch

KEY = jax.random.key(7)


def head_with(**changes):
    config = random_head(name="clover_lr")[0].config
    return registry.head(dataclasses.replace(config, **changes))


def hidden_states(head, params, batch, **arguments):
    """Return what training sees, and the base's matrices."""
    base_params = with_draft_rows(random_base(), head.config)
    teacher = teach(TINY, base_params, head.config.features, batch)
    frozen = frozen_from_base(base_params)
    inputs = (frozen, teacher.features, batch)
    apply = functools.partial(head.module.apply, {"params": params}, method="train_forward")
    return apply(*inputs, **arguments), frozen


def test_it_begins_without_a_correction_and_with_the_last_state_alone():
    head, params = random_head(name="clover_lr")
    hidden, _ = hidden_states(head, params, random_batch())
    width = TINY.hidden_size
    assert not hidden[..., width:].any()
    assert not params["fuse"].any()
    only_last = head_with(features=("pre_norm",))
    fewer = {name: leaf for name, leaf in params.items() if name != "fuse"}
    alone, _ = hidden_states(only_last, fewer, random_batch())
    np.testing.assert_allclose(hidden, alone, atol=1e-6)


@pytest.mark.parametrize("unit_inputs", [True, False])
def test_the_size_of_states_and_rows_means_nothing_where_inputs_are_scaled(unit_inputs):
    head, params = head_with(unit_inputs=unit_inputs), lively_params(name="clover_lr")
    batch = random_batch()
    teacher = teach(TINY, random_base(), head.config.features, batch)
    frozen = frozen_from_base(random_base())

    def hidden(features, lm_head):
        module, weights = head.module, frozen.replace(lm_head=lm_head)
        return module.apply({"params": params}, weights, features, batch, method="train_forward")

    found = hidden(teacher.features, frozen.lm_head)
    for other in (
        hidden(7 * teacher.features, frozen.lm_head),
        hidden(teacher.features, 7 * frozen.lm_head),
    ):
        assert np.allclose(found, other, atol=1e-3) == unit_inputs


@pytest.mark.parametrize("table", [None, tuple(range(3, 96, 2))])
def test_drafted_tokens_are_the_heads_own_most_probable_ones(table):
    head, params = head_with(drafted_share=1.0), lively_params(name="clover_lr")
    if table is not None:
        head = head_with(drafted_share=1.0, draft_to_target=table)
        params = params | {"correction_out": params["correction_out"][jnp.array(table)]}
    batch = random_batch(rows=1, size=12)
    drafted, frozen = hidden_states(head, params, batch, rng=KEY, progress=1.0)
    source = 4
    tokens, chosen = batch.tokens, []
    for position in range(head.config.num_positions - 1):
        # A text that says what the head said at `source` gives the same states there.
        u = drafted[position, :, source]
        best = head.module.apply({"params": params}, frozen, u, position, method="logits")
        token = int(best.argmax()) if table is None else table[int(best.argmax())]
        chosen.append(token)
        tokens = tokens.at[0, source + 2 + position].set(token)
    forced, _ = hidden_states(head, params, batch.replace(tokens=tokens))
    np.testing.assert_allclose(drafted[:, :, source], forced[:, :, source], atol=1e-5)
    assert chosen != batch.tokens[0, source + 2 : source + 6].tolist()


def test_the_share_of_drafted_tokens_grows_with_the_steps():
    head, params = head_with(drafted_share=0.8), lively_params(name="clover_lr")
    batch = random_batch(rows=4, size=24)
    text, _ = hidden_states(head, params, batch)
    states_at = jax.jit(lambda done: hidden_states(head, params, batch, rng=KEY, progress=done)[0])

    def changed(progress):
        states = states_at(progress)
        np.testing.assert_allclose(
            states[0], text[0], atol=1e-5
        )  # position 0 reads no drafted token
        return (jnp.abs(states[1] - text[1]).max(axis=-1) > 1e-3).mean()

    assert changed(0.0) == 0
    assert 0 < changed(0.25) < changed(0.75) < changed(1.0) < 1


def test_every_parameter_learns_from_drafted_tokens_and_the_choice_has_no_gradient():
    head, params = head_with(drafted_share=1.0), lively_params(name="clover_lr")
    batch = random_batch()
    teacher = teach(TINY, random_base(), head.config.features, batch)
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0), 16)

    def loss(params):
        return head_loss(config, params, random_base(), teacher, batch, KEY, 1.0)[0]

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert jnp.isfinite(leaf).all()
        assert leaf.any(), f"{jax.tree_util.keystr(path)} gets no gradient"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 33}, r"rank \(33\) must lie between 0 and hidden_size \(32\)"),
        ({"drafted_share": 1.5}, r"drafted_share \(1.5\) must lie between 0 and 1"),
        ({"drafted_share": 0.5, "rank": 0}, "rank 0 feeds no token back"),
        ({"features": ("pre_norm", "layer_1")}, "the last of the features .* must be pre_norm"),
        ({"token_input": "mlp"}, "token_input 'mlp' is not one of attention_decoder, linear"),
        ({"max_depth": 9}, r"max_depth \(9\) must be num_positions \(5\)"),
    ],
)
def test_impossible_heads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        head_with(loss=LossSpec(), **changes)


def test_a_head_that_does_not_say_how_its_token_enters_has_an_attention_decoder():
    config = random_head(name="clover_lr")[0].config
    written = config.to_dict()
    del written["token_input"]  # as in cards of earlier heads
    assert registry.config_from_dict(written).token_input == "attention_decoder"


def test_the_trunk_begins_as_the_last_layers_one_each_where_it_is_told_to():
    base, (head, params) = random_base(), random_head(name="clover_lr-bare")
    assert head.config.layers_in_order
    for mine, theirs in (("augmenting_0", "layers_1"), ("augmenting_1", "layers_2")):
        jax.tree.map(np.testing.assert_array_equal, params[mine], base[theirs])
    shallow = {name: base[name] for name in ("layers_0", "layers_1")}
    layers = from_last_layer(head.config, shallow, 3, in_order=True)
    expected = ("layers_0", "layers_0", "layers_1")
    assert all(layers[f"augmenting_{i}"] is base[name] for i, name in enumerate(expected))


@pytest.mark.parametrize("count", [0, -3, TINY.num_layers + 1])
def test_more_or_fewer_states_than_the_base_has_are_refused(count):
    with pytest.raises(ValueError, match=rf"num_features \({count}\) must lie between 1 and .* 3"):
        registry.config_for_base("clover_lr", TINY, num_features=count)


def test_a_shallow_base_gives_each_of_its_states_once():
    shallow = dataclasses.replace(TINY, num_layers=2)
    config = registry.config_for_base("clover_lr", shallow)
    assert config.features == ("layer_1", "pre_norm")
