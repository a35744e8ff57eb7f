"""Every head on the proportions of published bases, and on the scales that their weights have."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import RopeConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import TreeConfig, default_tree, parse_tree
from clover_jax.drafters import registry
from clover_jax.training.step import (
    OptimizerConfig,
    TrainStepConfig,
    fit_scale,
    init_state,
    make_train_step,
)
from tests.decoding.test_families import EXPERTS, GEMMA, GPT_OSS
from tests.tiny_models import DRAFTERS, TINY, decode_all, random_base, random_prompts
from tests.training.training_data import random_batch


def shape(hidden_size, num_heads, num_kv_heads, head_dim, **more):
    widths = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}
    return {**more, **widths, "num_kv_heads": num_kv_heads, "num_layers": 3}


# A sixteenth of the published widths or less: what heads must cope with are the ratios of width,
# head_dim and heads, and what the family's layers have beside Llama's.
PUBLISHED = {
    "Gemma 3 270M": shape(40, 4, 1, 16, **GEMMA | {"logit_cap": None, "score_cap": None}),
    "Gemma 3 1B": shape(72, 4, 1, 16, **GEMMA | {"logit_cap": None, "score_cap": None}),
    "Gemma 2 9B": shape(56, 8, 4, 4, **GEMMA),
    "Qwen3 0.6B": shape(64, 16, 8, 8, query_key_norm=True, tie_word_embeddings=True),
    "Qwen3 4B": shape(40, 8, 2, 8, query_key_norm=True, tie_word_embeddings=True),
    "Llama 3.2 1B": shape(64, 16, 4, 4, tie_word_embeddings=True),
    "Phi-4-mini": shape(48, 6, 2, 8, rope=RopeConfig(share=0.75), tie_word_embeddings=True),
    "gpt-oss": shape(90, 16, 2, 4, **GPT_OSS),
    "SmolLM3 3B": shape(64, 16, 4, 4, unrotated_layers=(1, 2), tie_word_embeddings=True),
    "Granite 3.3 2B": shape(64, 32, 8, 2, embedding_scale=12.0, score_scale=0.0156),
    "Mixtral": shape(64, 8, 2, 8, **EXPERTS | {"dense_layers": ()}),
}
# Clover-2 and Clover-LR read most of a base; the rest of the product is for the slow run.
USUAL = ("clover2", "clover_lr")
HEADS = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_and_decodes_on_the_proportions_of_a_published_base(name, family):
    config = dataclasses.replace(TINY, eos_token_ids=(2, 5), **PUBLISHED[family])
    base, prompts = random_base(config), random_prompts(2, seed=4)
    train = step_config(name, config)
    state, metrics = make_train_step(train)(fresh_state(train, base), base, random_batch())
    assert np.isfinite(metrics.loss)

    def texts(head, tree, params):
        engine = Engine(config, head, tree, batch_size=2)
        rows = decode_all(engine, base, params, prompts, 12, config.eos_token_ids)
        return [row.output_ids for row in rows]

    tree = parse_tree(default_tree(train.head.config.max_depth))
    plain = texts(None, TreeConfig.root_only(), None)
    assert texts(train.head, tree, state.params) == plain


def test_attention_decoders_take_the_bases_heads_where_its_head_dim_does_not_divide_the_width():
    heads = {
        family: registry.config_for_base("clover2", dataclasses.replace(TINY, **changes))
        for family, changes in PUBLISHED.items()
    }
    assert heads["Gemma 3 270M"].decoder_heads == heads["Gemma 3 1B"].decoder_heads == 4
    assert heads["gpt-oss"].decoder_heads == 15  # its 16 do not divide a width of 90
    assert heads["Qwen3 0.6B"].decoder_heads == heads["Llama 3.2 1B"].decoder_heads == 0


# Scales that published bases have, and beyond: the final norm of Gemma 3 270M lies in 0.19 to 301.
SCALES = {
    "as it is": {},
    "norm": {"norm": True},
    "states times 1000": {"states": 1000.0},
    "embedding of length 1": {"length": 1.0},
    "embedding of length 50": {"length": 50.0, "norm": True},
    "all, with a soft cap": {"length": 50.0, "norm": True, "states": 1000.0, "logit_cap": 30.0},
}


def rescaled(logit_cap=None, norm=False, states=1.0, length=None):
    """Return a random base of TINY's shape whose parts have these scales."""
    config = dataclasses.replace(TINY, logit_cap=logit_cap)
    params = dict(random_base(config))
    if length is not None:
        rows = params["lm_head"]
        params["lm_head"] = length * rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    if norm:
        width = config.hidden_size
        low, high = math.log(0.1), math.log(300)
        drawn = jax.random.uniform(jax.random.key(7), (width,), minval=low, maxval=high)
        params["final_norm"] = {"scale": jnp.exp(drawn)}
    params["embedding"] = states * params["embedding"]
    for name in [f"layers_{i}" for i in range(config.num_layers)]:
        layer = dict(params[name])
        layer["attention"] = layer["attention"] | {"out": states * layer["attention"]["out"]}
        layer["mlp"] = layer["mlp"] | {"down": states * layer["mlp"]["down"]}
        params[name] = layer
    return config, params


def step_config(name, base):
    kind, options = DRAFTERS[name]
    head = registry.head(registry.config_for_base(kind, base, **options))
    return TrainStepConfig(base, head, OptimizerConfig(10, 5e-3, 0))


def fresh_state(config, base_params):
    # Compiled, so that no param is the base's own buffer: the step consumes its state.
    return jax.jit(init_state, static_argnums=(0, 2))(config, base_params, 0)


@functools.cache
def first_losses(name, scales, fitted=True):
    """Return the soft cross-entropy of each position at the first step."""
    base, params = rescaled(**SCALES[scales])
    config, batch = step_config(name, base), random_batch(rows=8, size=40)
    head = config.head.config
    # Every head's loss as the same mean over pairs.
    changes = {"loss": dataclasses.replace(head.loss, divisor_offset=1e-5)}
    if name == "eagle":
        changes["feature_noise"] = 0.0  # has its width at 512 tokens, and 13 times that at 40
    head = registry.head(dataclasses.replace(head, **changes))
    config = dataclasses.replace(config, head=head)
    state = fresh_state(config, params)
    if fitted:
        state = fit_scale(config, state, params, batch)
    return make_train_step(config)(state, params, batch)[1].positions.terms.soft_ce


# Medusa with the base's lm_head has nothing of its own to scale: it starts as the base, by design.
OWN_SCALE = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.slow)
    for name in DRAFTERS
    if name != "medusa-shared"
]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", OWN_SCALE)
def test_no_head_begins_worse_than_guessing_whatever_the_bases_scales_are(name, scales):
    losses = first_losses(name, scales)
    assert losses.max() <= math.log(TINY.vocab_size) + 0.01
    if name in ("clover2", "clover", "clover_lr", "eagle"):
        assert losses[0] <= first_losses("medusa", scales, fitted=False)[0] + 0.01
