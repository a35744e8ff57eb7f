"""Random heads of EAGLE's kind that now and then guess right.

What they propose is mostly what the base said at the position before, which is right where a
random model's text repeats one token.
"""

import functools

import jax
import jax.numpy as jnp

from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from tests.tiny_models import TINY, random_base

KINDS = ("eagle",)


@functools.cache
def lively_head(kind: str = "eagle", config: BaseConfig = TINY, seed: int = 1):
    """Return a head and its params."""
    head = registry.head(registry.config_for_base(kind, config))
    params = registry.init_params(head, random_base(config), jax.random.key(seed))
    identity = jnp.eye(config.hidden_size)
    quiet = jax.tree.map(lambda x: 0.1 * x, params)
    fc = quiet["fc"].at[1].add(identity)
    return head, {**params, "fc": fc, "layer": {**params["layer"], **_quiet_outputs(params)}}


def _quiet_outputs(params):
    attention, mlp = params["layer"]["attention"], params["layer"]["mlp"]
    return {
        "attention": {**attention, "out": 0.1 * attention["out"]},
        "mlp": {**mlp, "down": 0.1 * mlp["down"]},
    }
