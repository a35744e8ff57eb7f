"""Random heads, of EAGLE's kind and of DFlash 2, that now and then guess right.

What they propose is mostly what the base said at the position before, or the token before, which is
right where a random model's text repeats one token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from tests.tiny_models import DRAFTERS, TINY, init_head, random_base

KINDS = ("eagle", "eagle3", "mtp", "dflash2")


@functools.cache
def lively_head(
    kind: str = "eagle",
    config: BaseConfig = TINY,
    seed: int = 1,
    draft_to_target: tuple[int, ...] | None = None,
):
    """Return a head and its params."""
    options = DRAFTERS["dflash2"][1] if kind == "dflash2" else {}
    config_of_head = registry.config_for_base(kind, config, **options)
    head = registry.head(dataclasses.replace(config_of_head, draft_to_target=draft_to_target))
    params = init_head(head, random_base(config), jax.random.key(seed))
    if kind == "dflash2":
        return head, _repeating(head.config, params, random_base(config)["embedding"])
    # The last of what fc mixes is the base's state: its last layer's, for a base this small.
    fc = (0.1 * params["fc"]).at[-1].add(jnp.eye(config.hidden_size))
    if kind in ("eagle", "mtp"):
        return head, {**params, "fc": fc, "layer": {**params["layer"], **_quiet(params["layer"])}}
    return head, {**params, "fc": fc, **_quiet(params)}


def _repeating(config, params, embedding):
    """Return params of DFlash 2 whose selector likes a token to be repeated."""
    mask, rank = embedding[config.mask_token_id], config.rank
    # Slots stay what they begin as, so that their gate is known; their own logits are flat.
    gate = jnp.outer(mask, jnp.ones(rank)) / jnp.linalg.norm(mask) / config.layer.hidden_size**0.5
    layer, table = params["layers_0"], config.draft_to_target
    attention, mlp = layer["attention"], layer["mlp"]
    quiet = {"attention": {**attention, "out": 1e-3 * attention["out"]}}
    quiet |= {"mlp": {**mlp, "down": 1e-3 * mlp["down"]}}
    codebook = jnp.eye(config.vocab_size, rank)
    return {
        **params,
        "layers_0": {**layer, **quiet},
        "norm": {"scale": 0.1 * params["norm"]["scale"]},
        "selector_gate": 30 * gate,
        "predecessor": codebook,
        "successor": codebook if table is None else codebook[jnp.array(table)],
    }


def _quiet(layer):
    """Let both sublayers, which add nothing in a fresh head, add a little."""
    attention, mlp, key = layer["attention"], layer["mlp"], jax.random.key(3)
    return {
        "attention": {**attention, "out": 0.02 * jax.random.normal(key, attention["out"].shape)},
        "mlp": {**mlp, "down": 0.02 * jax.random.normal(key, mlp["down"].shape)},
    }
