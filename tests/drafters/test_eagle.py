"""EAGLE-1 and EAGLE-3 give the numbers of their authors' code, and draft what they would."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import RopeConfig
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base, with_draft_rows
from clover_jax.drafters.eagle import noise_like
from clover_jax.drafters.eagle3 import feature_layers
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import causal_mask
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import make_head
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, head_loss
from clover_jax.training.teacher import teach
from tests import tiny_checkpoints
from tests.decoding.reference import speculative_greedy
from tests.foreign_heads import read_reference
from tests.layer_heads import lively_head
from tests.tiny_models import TINY, decoded, random_base, random_prompts
from tests.training.training_data import random_batch


def test_states_are_those_of_the_release(fixtures_dir):
    base, draft, batch, expected = read_reference(fixtures_dir / "clover2_reference", "eagle1")
    features = teach(base.config, base.params, draft.head.config.features, batch).features
    arguments = (frozen_from_base(base.params), features, batch, None)
    states = draft.head.module.apply({"params": draft.params}, *arguments, method="train_forward")
    np.testing.assert_allclose(states[0], expected["eagle1_states"], atol=1e-4, rtol=0)


def test_noise_is_uniform_and_wider_in_shorter_sequences():
    segment_ids = jnp.array([[1] * 40 + [2] * 8 + [0] * 2])
    noise = noise_like(jnp.zeros((1, 50, 4000)), segment_ids, jax.random.key(0), 0.1)
    for part, length in ((slice(0, 40), 40), (slice(40, 48), 8)):
        bound = 0.1 * 512 / length
        values = np.asarray(noise[0, part])
        assert np.abs(values).max() <= bound
        np.testing.assert_allclose(values.std(), bound / 3**0.5, rtol=0.02)
        np.testing.assert_allclose(values.mean(), 0, atol=0.02 * bound)


def loss_of(head, params, batch, key=None):
    teacher = teach(TINY, random_base(), head.config.features, batch)
    config = TrainStepConfig(TINY, head, OptimizerConfig(steps=1, warmup_steps=0), 16)
    key = jax.random.key(0) if key is None else key
    return head_loss(config, params, random_base(), teacher, batch, key)[0]


def test_training_is_noisy_and_repeatable_and_the_loss_divided_by_the_pairs_alone():
    head, params = lively_head("eagle")
    value = jax.jit(lambda key: loss_of(head, params, random_batch(), key))
    loss = value(jax.random.key(0))
    assert value(jax.random.key(0)) == loss
    assert value(jax.random.key(1)) != loss
    quiet = registry.head(dataclasses.replace(head.config, feature_noise=0.0))
    once, twice = random_batch(rows=1), random_batch(rows=1)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), twice)
    value = jax.jit(lambda batch: loss_of(quiet, params, batch))
    loss = value(once)
    np.testing.assert_allclose(loss, value(twice), rtol=1e-5)
    assert loss > 0.1


def test_the_rotary_base_is_the_base_models_unless_given_and_one_position_is_trained(tmp_path):
    config = dataclasses.replace(TINY, rope=RopeConfig(theta=5e5))
    base = tiny_checkpoints.random_base(tmp_path, config)
    head = make_head(TrainSettings(drafter="eagle"), base)
    assert head.config.layer.rope.theta == 5e5
    head = make_head(TrainSettings(drafter="eagle", draft_rope_theta=1e4), base)
    assert head.config.layer.rope.theta == 1e4
    with pytest.raises(UserError, match=r"num_positions \(5\) must be 1"):
        make_head(TrainSettings(drafter="eagle", num_positions=5), base)


STEPS = 4  # of the reference
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    base, draft, batch, expected = read_reference(fixtures_dir / "eagle3_reference", "eagle3")
    config = dataclasses.replace(draft.head.config, num_positions=STEPS)
    loss = dataclasses.replace(config.loss, pairs="release")
    head = registry.head(dataclasses.replace(config, loss=loss))
    return base, head, draft.params, batch, expected


@pytest.fixture(scope="module")
def teacher(reference):
    base, head, _, batch, _ = reference
    return teach(base.config, base.params, head.config.features, batch)


def test_features_are_those_of_the_reference(reference, teacher):
    _, head, _, _, expected = reference
    assert head.config.features == ("layer_2", "layer_4", "layer_5")
    np.testing.assert_allclose(teacher.features, expected["features"], **CLOSE)


def test_states_and_logits_of_every_step(reference, teacher):
    base, head, params, batch, expected = reference
    frozen, variables = frozen_from_base(base.params), {"params": params}
    arguments = (frozen, teacher.features, batch, None)
    hidden = head.module.apply(variables, *arguments, method="train_forward")
    np.testing.assert_allclose(hidden, expected["draft_hidden"], **CLOSE)
    for step in range(STEPS):
        logits = head.module.apply(variables, frozen, hidden[step], step, method="logits")
        np.testing.assert_allclose(logits, expected["draft_logits"][step], **CLOSE)


def test_losses_of_every_step(reference, teacher):
    base, head, params, batch, expected = reference
    base_params = with_draft_rows(base.params, head.config)
    config = TrainStepConfig(base.config, head, OptimizerConfig(steps=1, warmup_steps=0), 16)
    loss_of = jax.jit(functools.partial(head_loss, config))
    loss, parts = loss_of(params, base_params, teacher, batch, jax.random.key(0))
    np.testing.assert_allclose(parts.terms.soft_ce, expected["losses"], **CLOSE)
    weights = 0.8 ** np.arange(STEPS)
    np.testing.assert_allclose(loss, (weights * expected["losses"]).sum(), **CLOSE)


def test_every_parameter_gets_a_gradient_and_training_lowers_the_loss():
    head, params = lively_head("eagle3", draft_to_target=tuple(range(0, 96, 2)))
    head = registry.head(dataclasses.replace(head.config, num_positions=3))
    # A base that is sure of itself, so that there is something to learn.
    base = {**random_base(), "lm_head": 40 * random_base()["lm_head"]}
    base_params = with_draft_rows(base, head.config)
    batch = random_batch()
    teacher = teach(TINY, base_params, head.config.features, batch)
    config = TrainStepConfig(TINY, head, OptimizerConfig(steps=1, warmup_steps=0), 16)

    def loss(params):
        return head_loss(config, params, base_params, teacher, batch, jax.random.key(0))[0]

    differentiate, losses = jax.jit(jax.value_and_grad(loss)), []
    for _ in range(20):
        value, gradient = differentiate(params)
        losses.append(float(value))
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            assert leaf.any(), f"{jax.tree_util.keystr(path)} gets no gradient"
        params = jax.tree.map(lambda x, g: x - 0.01 * jnp.sign(g), params, gradient)
    assert losses[-1] < 0.9 * losses[0]


def test_documents_packed_in_a_row_do_not_see_each_other():
    head, params = lively_head("eagle3")
    head = registry.head(dataclasses.replace(head.config, num_positions=3))
    batch = random_batch(rows=1, num_segments=2)
    features = jax.random.normal(jax.random.key(0), (1, 20, 3 * TINY.hidden_size))
    second = np.flatnonzero(batch.segment_ids[0] == 2)
    frozen = frozen_from_base(random_base())

    @jax.jit
    def hidden(features, tokens, segment_ids, positions):
        arguments = (frozen, features, Batch(tokens, segment_ids, positions, tokens >= 0), None)
        return head.module.apply({"params": params}, *arguments, method="train_forward")

    packed = hidden(features, batch.tokens, batch.segment_ids, batch.positions)
    cut = [x[:, second] for x in (features, batch.tokens, batch.segment_ids, batch.positions)]
    alone = hidden(*cut)
    # The last positions read tokens beyond the document's end, which no pair counts.
    inner = second[: len(second) - 3]
    np.testing.assert_allclose(packed[:, :, inner], alone[:, :, : len(inner)], atol=1e-5)


def test_it_starts_with_the_bases_own_rows_and_norm():
    base, table = random_base(), tuple(range(1, 96, 3))
    params = lively_head("eagle3", draft_to_target=table)[1]
    np.testing.assert_array_equal(params["lm_head"], base["lm_head"][np.array(table)])
    np.testing.assert_array_equal(params["output_norm"]["scale"], base["final_norm"]["scale"])


def test_what_it_reads_of_a_base():
    assert feature_layers(32) == ("layer_2", "layer_16", "layer_29")
    assert feature_layers(7) == ("layer_2", "layer_3", "layer_4")
    assert feature_layers(4) == ("layer_1", "layer_2", "pre_norm")
    assert feature_layers(3) == ("layer_1", "layer_1", "pre_norm")
    assert feature_layers(1) == ("layer_0", "layer_0", "pre_norm")


CONTEXT = (5, 9)  # committed positions of the two rows
ALIBI = dataclasses.replace(TINY, alibi=True)


@pytest.fixture(scope="module", params=[("eagle", TINY), ("eagle3", TINY), ("eagle", ALIBI)])
def any_head(request):
    return lively_head(*request.param)


def apply(head, method, *arguments, depth=()):
    """Call a method of the head, compiled; `depth` is advance's static last argument."""
    return compiled(head[0], method, depth)(head[1], *arguments)


@functools.cache
def compiled(drafter, method, depth):
    return jax.jit(
        lambda params, *rest: drafter.module.apply({"params": params}, *rest, *depth, method=method)
    )


@pytest.fixture(scope="module")
def committed(any_head):
    """Features and following tokens of two rows' contexts, as absorb takes them."""
    width = TINY.hidden_size * len(any_head[0].config.features)
    features = jax.random.normal(jax.random.key(3), (2, max(CONTEXT), width))
    tokens = jax.random.randint(jax.random.key(4), (2, max(CONTEXT)), 0, TINY.vocab_size)
    return features, tokens


def recomputed(any_head, committed, row, path):
    """Return the output at the end of a path by causal forwards over context and path.

    A drafted token's state is its parent's output, so they are found one after another; what lies
    beyond is padding, which the causal mask keeps apart.
    """
    features, tokens = (x[row : row + 1, : CONTEXT[row]] for x in committed)
    frozen = frozen_from_base(random_base())
    size, at = 12, CONTEXT[row]  # one size for all, so that it compiles once
    states = jnp.pad(apply(any_head, "fuse", features), ((0, 0), (0, size - at), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, size - at)))
    attended = jnp.arange(size)[None], causal_mask(1, size), None, None
    for token in [*path, None]:
        hidden, _ = apply(any_head, "run", frozen.embedding[tokens], states, attended)
        if token is not None:
            states = states.at[:, at].set(hidden[:, at - 1])
            tokens, at = tokens.at[:, at].set(token), at + 1
    return hidden[0, at - 1]


def test_states_of_a_drafted_tree_equal_a_full_recomputation_along_each_path(any_head, committed):
    frozen = frozen_from_base(random_base())
    cache = any_head[0].module.init_cache(2, 32, jnp.float32)
    # In two pieces of unequal lengths, the second with rows of garbage at the end.
    first, rest = jnp.array([3, 3]), jnp.array(CONTEXT) - 3
    zero = jnp.zeros(2, jnp.int32)
    features, tokens = committed
    begun = AcceptedPositions(features[:, :3], tokens[:, :3], zero, first, tokens)
    _, cache = apply(any_head, "absorb", frozen, begun, cache)
    others = AcceptedPositions(features[:, 3:], tokens[:, 3:], first, rest, tokens)
    state, cache = apply(any_head, "absorb", frozen, others, cache)
    # Every row chooses parents of its own, out of order, as an adaptive tree does.
    levels = [
        ([[0, 0, 0]] * 2, [[7, 8, 9], [17, 18, 19]]),
        ([[2, 0, 0], [1, 1, 2]], [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2], [2, 0]], [[11, 12], [13, 14]]),
    ]
    paths = [[()], [()]]  # of each row's branches
    for depth, (parents, drafted) in enumerate(levels, start=1):
        arguments = (frozen, state, cache, jnp.array(parents), jnp.array(drafted))
        state = apply(any_head, "advance", *arguments, depth=(depth,))
        paths = [
            [(*paths[row][p], t) for p, t in zip(parents[row], drafted[row], strict=True)]
            for row in range(2)
        ]
        for row in range(2):
            for branch, path in enumerate(paths[row]):
                expected = recomputed(any_head, committed, row, path)
                np.testing.assert_allclose(state.hidden[row, branch], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "table"), [("eagle", None), ("eagle3", tuple(range(0, TINY.vocab_size, 2)))]
)
def test_the_fast_path_accepts_what_the_slow_judge_accepts(kind, table):
    drafter = lively_head(kind, draft_to_target=table)
    prompts, tree = random_prompts(2, seed=4), parse_tree("chain:3")
    rows = decoded(drafter, tree, prompts, 12, batch_size=1)
    for prompt, row in zip(prompts, rows, strict=True):
        text, accepted = speculative_greedy(*drafter, TINY, random_base(), prompt, 12, tree)
        assert (row.output_ids, row.accepted) == (text, accepted)
