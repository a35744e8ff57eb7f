"""Random tiny bases and heads: small enough to compile in seconds, lively enough to accept.

Greedy text of a random model soon runs in circles, and a head initialized from the base follows
it part of the way: accepted lengths from 0 to the tree's depth all occur.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.shapes import SHAPES
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.config import BaseConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import Request
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters import registry
from clover_jax.models.decoder import Decoder, causal_mask

WIDTHS = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
HEADS = {"num_heads": 4, "num_kv_heads": 2}
TINY = BaseConfig(**WIDTHS, **HEADS, num_layers=3, max_position_embeddings=1024)

ONE_LAYER = {"num_augmenting_layers": 1}
# What holds for every drafter is tested on these: name -> (kind, options of its make_config).
DRAFTERS = {
    "clover2": ("clover2", {}),
    "clover2-ablated": ("clover2", {"order": "block_first", "output_projector": False} | ONE_LAYER),
    "clover": ("clover", {}),
    "clover-mlp": ("clover", {"regressive_block": "mlp"}),
    "clover-bare": ("clover", {"regressive_block": "none", "num_augmenting_layers": 0}),
    "clover_lr": ("clover_lr", {"rank": 8}),
    "clover_lr-bare": ("clover_lr", {"rank": 0, "num_features": 1}),
    "medusa": ("medusa", {}),
    "medusa-shared": ("medusa", {"own_output": False}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"num_positions": 4}),
    "mtp": ("mtp", {"num_positions": 2}),
    "dflash2": ("dflash2", {"num_layers": 1, "num_positions": 5, "rank": 8, "candidates": 3}),
}

# What drafts without weights: every test of decoding runs over these too.
TRAINING_FREE = {"lookup": ("lookup", {}), "recycle": ("recycle", {})}

SMALL_TREE = TreeConfig("small", ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

LLAMA3_8B = SHAPES["llama3-8b"]


@functools.cache
def random_base(config: BaseConfig = TINY, seed: int = 0):
    """Return the base's params."""
    with jax.ensure_compile_time_eval():  # kept for all tests, also where one first asks in a jit
        return _init(config, jax.random.key(seed))


@functools.cache
def random_head(
    config: BaseConfig = TINY,
    name: str = "clover2",
    seed: int = 1,
    draft_to_target: tuple[int, ...] | None = None,
):
    """Return a head of DRAFTERS or TRAINING_FREE, and its params, begun from that base."""
    kind, options = (DRAFTERS | TRAINING_FREE)[name]
    of_base = registry.config_for_base(kind, config, **options)
    head = registry.head(dataclasses.replace(of_base, draft_to_target=draft_to_target))
    return head, init_head(head, random_base(config), jax.random.key(seed))


def lively_params(config: BaseConfig = TINY, name: str = "clover2", seed: int = 1):
    """Return a head's params with noise, so that nothing is at the zero that it starts from."""
    leaves, structure = jax.tree.flatten(random_head(config, name)[1])
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = (0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
    return jax.tree.unflatten(structure, map(jnp.add, leaves, noise))


# One program each: op by op, every shape of every param would be compiled by itself.
@functools.partial(jax.jit, static_argnums=0)
def _init(config: BaseConfig, key):
    ids = jnp.zeros((1, 2), jnp.int32)
    return Decoder(config).init(key, ids, ids, causal_mask(1, 2))["params"]


init_head = jax.jit(registry.init_params, static_argnums=0)


def random_models(head, params, tree: TreeConfig) -> Models:
    """Return a head and the random base as an engine takes them, without a tokenizer."""
    base = BaseModel(TINY, random_base(), Path(), "random")
    return Models(base, None, Draft(head, params, None, {}, "random"), tree)


def decode_all(engine, base_params, draft_params, prompts, max_new_tokens, eos_ids=()):
    """Decode all prompts by an engine and return the generations in order."""
    requests = [Request(i, p, max_new_tokens, eos_ids) for i, p in enumerate(prompts)]
    return finished(engine.stream(base_params, draft_params, requests))


def decode(engine, requests, config=TINY):
    """Decode requests by an engine of the random base and its Clover-2 head."""
    return finished(engine.stream(random_base(config), random_head(config)[1], requests))


def finished(updates):
    """Return the generations of a stream in order."""
    return sorted((each.row for each in updates if each.done), key=lambda row: row.index)


def decoded(drafter, tree, prompts, max_new_tokens, config=TINY, base=None, **options):
    """Decode prompts with a head and its params, or plainly with None; return the generations.

    tree: a tree or its name. base: params, by default the random base's. options: the engine's.
    """
    head, params = drafter or (None, None)
    tree = parse_tree(tree if drafter else "none") if isinstance(tree, str) else tree
    base = random_base(config) if base is None else base
    engine = Engine(config, head, tree, **({"batch_size": 8} | options))
    return decode_all(engine, base, params, prompts, max_new_tokens)


def texts_of(rows):
    return [row.output_ids for row in rows]


def random_prompts(count: int, seed: int = 0, vocab_size: int = TINY.vocab_size):
    """Return prompts of mixed lengths, among them those at the edges of the prefill chunks."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 2, 3, 7, 20, 63, 64, 65, 100], size=count)
    return [rng.integers(0, vocab_size, size=length).tolist() for length in lengths]
