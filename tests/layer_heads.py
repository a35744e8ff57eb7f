"""Random heads of EAGLE's kind that now and then guess right.

What they propose is mostly what the base said at the position before, which is right where a
random model's text repeats one token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from tests.tiny_models import TINY, random_base

KINDS = ("eagle", "eagle3")


@functools.cache
def lively_head(
    kind: str = "eagle",
    config: BaseConfig = TINY,
    seed: int = 1,
    draft_to_target: tuple[int, ...] | None = None,
):
    """Return a head and its params."""
    config_of_head = registry.config_for_base(kind, config)
    head = registry.head(dataclasses.replace(config_of_head, draft_to_target=draft_to_target))
    params = registry.init_params(head, random_base(config), jax.random.key(seed))
    # The last of what fc mixes is the base's state: its last layer's, for a base this small.
    fc = (0.1 * params["fc"]).at[-1].add(jnp.eye(config.hidden_size))
    if kind == "eagle":
        return head, {**params, "fc": fc, "layer": {**params["layer"], **_quiet(params["layer"])}}
    return head, {**params, "fc": fc, **_quiet(params)}


def _quiet(layer):
    attention, mlp = layer["attention"], layer["mlp"]
    return {
        "attention": {**attention, "out": 0.1 * attention["out"]},
        "mlp": {**mlp, "down": 0.1 * mlp["down"]},
    }
