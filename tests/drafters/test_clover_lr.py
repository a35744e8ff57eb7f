"""Clover-LR: start, correction, options."""

import dataclasses

import jax
import numpy as np
import pytest

from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.drafters.augmenting import from_last_layer
from clover_jax.drafters.drafter import frozen_from_base, with_draft_rows
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
