"""What the contract promises, for every drafter of `tiny_models.DRAFTERS`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel, fingerprint
from clover_jax.checkpoints.shapes import base_shapes, cast_shapes
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import LossSpec
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
    head_loss,
    init_state,
    make_train_step,
)
from clover_jax.training.teacher import teach
from tests.tiny_folders import save_draft
from tests.tiny_models import DRAFTERS, LLAMA3_8B, TINY, lively_params, random_base, random_head
from tests.training.training_data import random_batch

every_drafter = pytest.mark.parametrize("name", DRAFTERS)
SIZE = 14
FAST = OptimizerConfig(10, 5e-3, 0)


def made_of(name, base):
    kind, options = DRAFTERS[name]
    return registry.head(registry.config_for_base(kind, base, **options))


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
    frozen, features = (
        frozen_from_base(random_base()),
        select_features(hidden, head.config.features),
    )
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
            read, following = (
                x[:, i : i + size] for x, i in ((features, begin), (tokens, begin + 1))
            )
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


# EAGLE-3 learns from the base's distribution alone, and a random base's is flat: see its own tests.
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "eagle3"])
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
    head, base_params = made_of(name, base), base_shapes(base, dtype)
    config = TrainStepConfig(base, head, FAST)
    state = jax.eval_shape(lambda base: init_state(config, base, 0), base_params)
    ids = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, size), bool))
    make_train_step(config).trace(state, base_params, batch).lower(
        lowering_platforms=("tpu", "cuda")
    )
    tree = parse_tree(default_tree(head.config.max_depth))
    weights = Weights(base_params, cast_shapes(state.params, dtype))
    state = jax.eval_shape(lambda: empty_state(base, head, tree, rows, size, 8, dtype))
    step = jax.jit(lambda *x: speculate_and_verify(StepConfig(base, head, tree), *x))
    step.trace(weights, state).lower(lowering_platforms=("tpu", "cuda"))


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


def test_what_a_kind_cannot_be_told_is_named_with_what_it_can():
    message = "a medusa head has no option rope; its options: num_positions, own_output, loss"
    with pytest.raises(UserError, match=message):
        registry.config_for_base("medusa", TINY, rope=None)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("clover", {"regressive_block": "gru"}, "'gru' is not one of attention_decoder, mlp, none"),
        ("clover", {"num_positions": 0}, r"num_positions \(0\) must be at least 1"),
        (
            "clover",
            {"num_augmenting_layers": -1},
            r"num_augmenting_layers \(-1\) must be at least 0",
        ),
        ("clover2", {"order": "last"}, "order 'last' is not one of decoder_first, block_first"),
        ("medusa", {"num_positions": 0}, r"num_positions \(0\) must be at least 1"),
    ],
)
def test_impossible_heads_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        registry.config_for_base(kind, TINY, **options)


@pytest.mark.parametrize("name", ["clover", "medusa"])
def test_a_card_that_promises_a_deeper_draft_is_refused(name):
    config = random_head(name=name)[0].config
    with pytest.raises(ValueError, match=r"max_depth \(9\) must be num_positions"):
        dataclasses.replace(config, max_depth=9, loss=LossSpec())
