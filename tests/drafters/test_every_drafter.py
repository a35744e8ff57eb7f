"""What the contract promises, for every drafter of DRAFTERS and on published bases."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel, fingerprint
from clover_jax.checkpoints.shapes import base_shapes, cast_shapes
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import LossSpec, RopeConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify
from clover_jax.decoding.tree_config import default_tree, parse_tree
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import (
    AcceptedPositions,
    FewTokens,
    frozen_from_base,
    select_features,
)
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, causal_mask
from clover_jax.training.step import (
    OptimizerConfig,
    TrainStepConfig,
    fit_start,
    head_loss,
    init_state,
    make_train_step,
)
from clover_jax.training.teacher import teach
from tests.decoding.test_greedy_equality import (
    EXPERTS,
    GEMMA,
    GEMMA4,
    GLM,
    GPT_OSS,
    HYBRID,
    OLMO,
    SHARED,
)
from tests.tiny_folders import save_draft
from tests.tiny_models import (
    DRAFTERS,
    LLAMA3_8B,
    TINY,
    decode_all,
    lively_params,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)
from tests.training.training_data import random_batch

every_drafter = pytest.mark.parametrize("name", DRAFTERS)
SIZE = 14
FAST = OptimizerConfig(10, 5e-3, 0)


@functools.cache
def text_and_states():
    """Return tokens [1, S] and the base's activations at each."""
    tokens = jax.random.randint(jax.random.key(3), (1, SIZE), 0, TINY.vocab_size)
    positions = jnp.arange(SIZE)[None]
    forward = jax.jit(Decoder(TINY).apply)
    output = forward({"params": random_base()}, tokens, positions, causal_mask(1, SIZE))
    return tokens, output.hidden


@every_drafter
def test_drafting_the_true_tokens_gives_the_logits_of_training(name):
    head, _ = random_head(name=name)
    tokens, hidden = text_and_states()
    frozen = frozen_from_base(random_base())
    features = select_features(hidden, head.config.features)
    first, count = 5, 3  # the prompt comes in two pieces, the second one ragged
    last = first + count - 1

    @jax.jit
    def trained(params, tokens, features):
        apply = functools.partial(head.module.apply, {"params": params}, frozen)
        ones, positions = jnp.ones_like(tokens), jnp.arange(SIZE)[None]
        batch = Batch(tokens, ones, positions, ones > 0)
        states = apply(features, batch, None, method="train_forward")
        logits = [apply(u[:, last], i, method="logits") for i, u in enumerate(states)]
        if not getattr(head.module, "rescores", False):
            return logits
        rescore = functools.partial(head.module.apply, {"params": params}, method="rescore")
        return [rescore(u[:, last], each) for u, each in zip(states, logits, strict=True)]

    @jax.jit
    def drafted(params, tokens, features):
        apply = functools.partial(head.module.apply, {"params": params}, frozen)
        start, parent = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
        cache = head.module.init_cache(1, SIZE, jnp.float32)
        for begin, size, valid in [(0, first, first), (first, 5, count)]:
            read, following = features[:, begin:][:, :size], tokens[:, begin + 1 :][:, :size]
            accepted = AcceptedPositions(read, following, start + begin, start + valid, tokens)
            state, cache = apply(accepted, cache, method="absorb")
        proposals = []
        for depth in range(head.config.num_positions):
            proposals.append(jax.tree.map(lambda x: x[:, 0], apply(state, depth, method="propose")))
            token = tokens[:, last + 2 + depth][:, None]
            state = apply(state, cache, parent, token, depth + 1, method="advance")
        return proposals

    arguments = (lively_params(name=name), tokens, features)
    pairs = zip(drafted(*arguments), trained(*arguments), strict=True)
    for depth, (found, expected) in enumerate(pairs):
        if isinstance(found, FewTokens):  # the probability of each, given that it is one of them
            expected = jax.nn.log_softmax(jnp.take_along_axis(expected, found.ids, axis=-1))
            found = found.log_probability
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"depth {depth}")


compiled_teacher = jax.jit(teach, static_argnums=(0, 2))


@jax.jit
def descended(params, gradient):
    return jax.tree.map(lambda x, g: x - 0.01 * jnp.sign(g), params, gradient)


@functools.cache
def compiled_loss(name):
    """Return a function from a head's params to its loss on one batch and the gradient."""
    head, _ = random_head(name=name)
    config = TrainStepConfig(TINY, head, FAST, 16)

    def loss(params, base_params, teacher, batch):
        return head_loss(config, params, base_params, teacher, batch, jax.random.key(0))[0]

    compiled, batch = jax.jit(jax.value_and_grad(loss)), random_batch()
    teacher = compiled_teacher(TINY, random_base(), head.config.features, batch)
    return lambda params: compiled(params, random_base(), teacher, batch)


@every_drafter
def test_a_gradient_reaches_every_parameter(name):
    _, gradient = compiled_loss(name)(lively_params(name=name))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(leaf).all()
        assert leaf.any(), f"{jax.tree_util.keystr(path)} gets no gradient"


# These learn from the base's distribution alone, and a random base's is flat: see their own tests.
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in ("eagle3", "mtp")])
def test_training_on_one_batch_lowers_its_loss(name):
    params, losses = random_head(name=name)[1], []
    for _ in range(30):
        loss, gradient = compiled_loss(name)(params)
        losses.append(float(loss))
        params = descended(params, gradient)
    assert losses[-1] < 0.95 * losses[0]


@every_drafter
def test_a_draft_directory_gives_the_same_head_back(name, tmp_path):
    base = BaseModel(config=TINY, params=random_base(), directory=tmp_path, source="random")
    head, params = random_head(name=name)
    save_draft(tmp_path / "head", head.config, params, None, fingerprint(base), {})
    draft = load_draft(tmp_path / "head", base)
    assert draft.head.config == head.config
    jax.tree.map(np.testing.assert_array_equal, draft.params, params)


@pytest.mark.parametrize(
    ("name", "num_layers"),  # all layers of a base are alike, so two of them are usual
    [
        *(("clover", 2), ("medusa", 2)),
        *(pytest.param(name, LLAMA3_8B.num_layers, marks=pytest.mark.slow) for name in DRAFTERS),
    ],
)
def test_it_trains_and_drafts_on_accelerators_at_the_size_of_llama_3_8b(name, num_layers):
    base = dataclasses.replace(LLAMA3_8B, num_layers=num_layers)
    dtype, rows, size = jnp.bfloat16, 4, 2048
    config, base_params = step_config(name, base), base_shapes(base, dtype)
    head = config.head
    state = jax.eval_shape(lambda base: init_state(config, base, 0), base_params)
    ids = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, size), bool))
    platforms = {"lowering_platforms": ("tpu", "cuda")}
    make_train_step(config).trace(state, base_params, batch).lower(**platforms)
    tree = parse_tree(default_tree(head.config.max_depth))
    weights = Weights(base_params, cast_shapes(state.params, dtype))
    state = jax.eval_shape(lambda: empty_state(base, head, tree, rows, size, 8, dtype))
    step = jax.jit(lambda *x: speculate_and_verify(StepConfig(base, head, tree), *x))
    step.trace(weights, state).lower(**platforms)


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in DRAFTERS.items() if kind in ("clover", "medusa")]
)
def test_a_head_per_position_goes_no_deeper(name):
    head, _ = random_head(name=name)
    deepest = head.config.num_positions
    message = (
        f"tree 'chain:{deepest + 1}' is {deepest + 1} deep; this {head.config.kind} head drafts at "
        f"most {deepest} tokens.*use clover4, chain:{deepest} or dynamic:NODES:{deepest}"
    )
    with pytest.raises(UserError, match=message):
        StepConfig(TINY, head, parse_tree(f"chain:{deepest + 1}"))
    StepConfig(TINY, head, parse_tree(f"chain:{deepest}"))
    StepConfig(TINY, head, parse_tree(default_tree(deepest)))


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("clover", {"regressive_block": "gru"}, "'gru' is not one of attention_decoder, mlp, none"),
        ("clover", {"num_positions": 0}, r"num_positions \(0\) must be at least 1"),
        ("clover", {"decoder_heads": 5}, r"decoder_heads \(5\) must divide hidden_size \(32\)"),
        ("clover", {"num_augmenting_layers": -1}, r"augmenting_layers \(-1\) must be at least 0"),
        ("clover2", {"order": "last"}, "order 'last' is not one of decoder_first, block_first"),
        ("medusa", {"num_positions": 0}, r"num_positions \(0\) must be at least 1"),
        ("dflash2", {"num_positions": 0}, r"num_positions \(0\) must be at least 1"),
        ("dflash2", {"mask_token_id": 96}, r"mask_token_id \(96\) must lie in 0 .. 95"),
        ("dflash2", {"candidates": 0}, r"candidates \(0\) 1"),
        ("dflash2", {"conv_group": 5}, r"conv_group \(5\) divide hidden_size \(32\)"),
    ],
)
def test_impossible_heads_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        registry.config_for_base(kind, TINY, **options)


def test_a_card_that_promises_a_deeper_draft_is_refused():
    for name in ("clover", "medusa"):
        with pytest.raises(ValueError, match=r"max_depth \(9\) must be num_positions"):
            dataclasses.replace(random_head(name=name)[0].config, max_depth=9, loss=LossSpec())


def shape(hidden_size, num_heads, num_kv_heads, head_dim, **more):
    widths = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}
    return {"num_layers": 3, **more, **widths, "num_kv_heads": num_kv_heads}


def without_heads(family):
    return {name: x for name, x in family.items() if name not in ("num_kv_heads", "head_dim")}


# Layers with a window have narrower heads, and more of them that make keys.
WIDER = without_heads(GEMMA4) | {"full_attention_layers": (2,)}
E2B = {"keys_as_values": False, "local_head_dim": 4, "local_kv_heads": 1}


# A sixteenth of the published widths or less: what heads must cope with are the ratios of width,
# head_dim and heads, and what the family's layers have beside Llama's.
PUBLISHED = {
    "Gemma 3 270M": shape(40, 4, 1, 16, **GEMMA | {"logit_cap": None, "score_cap": None}),
    "Gemma 3 1B": shape(72, 4, 1, 16, **GEMMA | {"logit_cap": None, "score_cap": None}),
    "Gemma 2 9B": shape(56, 8, 4, 4, **GEMMA),
    "Gemma 4 26B-A4B": shape(44, 4, 1, 16, **WIDER),
    "Gemma 4 31B": shape(84, 8, 1, 16, **WIDER | {"num_experts": 0, "experts_per_token": 0}),
    "Gemma 4 E2B": shape(24, 8, 1, 8, **without_heads(SHARED) | E2B),
    "Qwen3 0.6B": shape(64, 16, 8, 8, query_key_norm=True, tie_word_embeddings=True),
    "Qwen3 4B": shape(40, 8, 2, 8, query_key_norm=True, tie_word_embeddings=True),
    "Llama 3.2 1B": shape(64, 16, 4, 4, tie_word_embeddings=True),
    "Phi-4-mini": shape(48, 6, 2, 8, rope=RopeConfig(share=0.75), tie_word_embeddings=True),
    "gpt-oss": shape(90, 16, 2, 4, **GPT_OSS),
    "SmolLM3 3B": shape(64, 16, 4, 4, unrotated_layers=(1, 2), tie_word_embeddings=True),
    "Granite 3.3 2B": shape(64, 32, 8, 2, embedding_scale=12.0, score_scale=0.0156),
    "Mixtral": shape(64, 8, 2, 8, **EXPERTS | {"dense_layers": ()}),
    "OLMo 3 7B": shape(64, 8, 8, 8, **OLMO),
    "GLM-4.5-Air": shape(64, 24, 2, 8, **GLM),
    # Two delta nets, then attention with a wider head than the width divides into.
    "Qwen3-Next": shape(
        64, 8, 1, 16, **HYBRID | {"dense_layers": (), "full_attention_layers": (2,)}
    ),
}
# Widths that the head_dim does not divide, few key heads, windows, sinks and experts; heads of two
# widths and shared keys; states; layers without rotation. What else a layer is,
# test_greedy_equality.py decodes.
USUAL_PAIRS = {("clover2", "Gemma 3 270M"), ("clover2", "gpt-oss"), ("clover2", "SmolLM3 3B")}
USUAL_PAIRS |= {("clover_lr", "Qwen3-Next"), ("clover_lr", "Gemma 4 E2B")}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(*pair, marks=() if pair in USUAL_PAIRS else pytest.mark.slow)
        for pair in itertools.product(DRAFTERS, PUBLISHED)
    ],
)
def test_every_head_trains_and_decodes_on_the_proportions_of_a_published_base(name, family):
    config = dataclasses.replace(TINY, eos_token_ids=(2, 5), **PUBLISHED[family])
    base, prompts = random_base(config), random_prompts(2, seed=4)
    train = step_config(name, config)
    state, metrics = make_train_step(train)(fresh_state(train, base), base, random_batch())
    assert np.isfinite(metrics.loss)

    def texts(head, params, tree):
        engine = Engine(config, head, parse_tree(tree), batch_size=2)
        return texts_of(decode_all(engine, base, params, prompts, 12, config.eos_token_ids))

    tree = default_tree(train.head.config.max_depth)
    assert texts(train.head, state.params, tree) == texts(None, None, "none")


def test_attention_decoders_take_the_bases_heads_where_its_head_dim_does_not_divide_the_width():
    bases = {family: dataclasses.replace(TINY, **changes) for family, changes in PUBLISHED.items()}
    heads = {family: registry.config_for_base("clover2", base) for family, base in bases.items()}
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
        drawn = jax.random.uniform(jax.random.key(7), (config.hidden_size,))
        params["final_norm"] = {"scale": 0.1 * 3000**drawn}  # from 0.1 to 300
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
    return TrainStepConfig(base, head, FAST)


def fresh_state(config, base_params):
    # Compiled, so that no param is the base's own buffer: the step consumes its state.
    return jax.jit(init_state, static_argnums=(0, 2))(config, base_params, 0)


@functools.cache
def first_losses(name, scales, fitted=True, seed=0):
    """Return the soft cross-entropy of each position at the first step, which has batch `seed`."""
    base, params = rescaled(**SCALES[scales])
    config, batch = step_config(name, base), random_batch(rows=8, size=40)
    head = config.head.config
    # Every head's loss as the same mean over pairs.
    changes = {"loss": dataclasses.replace(head.loss, divisor="pairs", divisor_offset=1e-5)}
    if name == "eagle":
        changes["feature_noise"] = 0.0  # has its width at 512 tokens, and 13 times that at 40
    config = dataclasses.replace(config, head=registry.head(dataclasses.replace(head, **changes)))
    state = fresh_state(config, params)
    if fitted:
        state = fit_start(config, state, params, batch)
    batch = random_batch(rows=8, size=40, seed=seed)
    return make_train_step(config)(state, params, batch)[1].positions.terms.soft_ce


# Medusa with the base's lm_head has nothing of its own to scale: it starts as the base, by design.
OWN_SCALE = [name for name in DRAFTERS if name != "medusa-shared"]
# All scales at once, and the one that the others undo; the rest of the product is for the slow run.
USUAL_SCALES = {"all, with a soft cap", "embedding of length 1"}


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        pytest.param(name, scales, marks=() if is_usual else pytest.mark.slow)
        for name, scales in itertools.product(OWN_SCALE, SCALES)
        for is_usual in [name in ("clover2", "clover_lr") and scales in USUAL_SCALES]
    ],
)
def test_no_head_begins_worse_than_guessing_whatever_the_bases_scales_are(name, scales):
    losses = first_losses(name, scales)
    assert losses.max() <= math.log(TINY.vocab_size) + 0.01
    if name in ("clover2", "clover", "clover_lr", "eagle"):
        assert losses[0] <= first_losses("medusa", scales, fitted=False)[0] + 0.01


def test_random_layers_begin_better_than_guessing_where_the_base_prefers_some_tokens():
    # A last norm near 0 guesses, and AdamW takes a short training's steps to leave it. The batch is
    # another than the one that the norm is fitted to.
    assert first_losses("dflash2", "norm", seed=1).max() <= math.log(TINY.vocab_size) - 0.1
