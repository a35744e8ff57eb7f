"""The loss against a plain one, which pairs it counts, and the time that its chunks take."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.shapes import base_shapes, random_params, shape_config
from clover_jax.config import LossSpec
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import frozen_from_base, with_draft_rows
from clover_jax.models.batch import Batch
from clover_jax.runtime.turns import time_in_turns
from clover_jax.training import pairs
from clover_jax.training.losses import distillation_loss
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, head_loss
from clover_jax.training.teacher import teach
from tests.foreign_heads import read_reference
from tests.tiny_models import TINY, init_head, lively_params, random_base, random_head
from tests.training.reference import plain_loss
from tests.training.training_data import OwnMatrixHead, random_batch, random_states

TERMS = {"regression": 3.0, "soft_ce": 0.5, "hard_ce": 2.0, "total_variation": 1.5}
ALL_TERMS = LossSpec(**TERMS, candidate_ce=0.25, decay=0.7, divisor_offset=0.25)
DPACE = dataclasses.replace(ALL_TERMS, dpace=0.5)

# Op by op, every operation on every shape would be compiled by itself.
anchored_mask = jax.jit(pairs.anchored_mask, static_argnames="num_positions")
compact_targets = jax.jit(pairs.compact_targets, static_argnames="groups")
labeled_targets = jax.jit(pairs.labeled_targets)
pair_mask = jax.jit(pairs.pair_mask, static_argnames=("num_positions", "convention"))
sample_anchors = jax.jit(pairs.sample_anchors, static_argnums=2)


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    base, draft, batch, expected = read_reference(fixtures_dir / "clover2_reference", "clover2")
    return base, with_loss(draft.head, _release(draft)), draft.params, batch, expected


def _release(draft):
    return dataclasses.replace(draft.head.config.loss, pairs="release")


def test_losses_equal_the_releases_with_the_releases_weights(reference):
    base, head, params, batch, expected = reference
    config = TrainStepConfig(base.config, head, OptimizerConfig(steps=1, warmup_steps=0), 16)
    loss, parts = _taught_loss(config, params, base.params, batch)
    close = {"rtol": 0, "atol": 1e-4}
    np.testing.assert_allclose(parts.terms.regression, expected["clover2_regression_loss"], **close)
    np.testing.assert_allclose(parts.terms.soft_ce, expected["clover2_distill_loss"], **close)
    np.testing.assert_allclose(loss, expected["clover2_total_loss"], **close)


def test_losses_equal_the_releases_on_the_releases_states(reference):
    base, head, params, batch, expected = reference
    states = jnp.asarray(expected["clover2_states"]), jnp.asarray(expected["base_postnorm"])
    compiled = jax.jit(functools.partial(distillation_loss, head))
    loss, parts = compiled(params, frozen_from_base(base.params), *states, batch)
    np.testing.assert_allclose(parts.terms.soft_ce, expected["clover2_distill_loss"], atol=1e-5)
    np.testing.assert_allclose(loss, expected["clover2_total_loss"], atol=1e-5)


def _all_terms(**changes):
    return dataclasses.replace(ALL_TERMS, **changes)


FEW = {"num_positions": 3}  # of 5: each is compiled by itself
EVERY_SECOND = {"draft_to_target": tuple(range(1, 96, 2))}


@pytest.mark.parametrize(
    ("chunk", "groups", "changes"),
    [
        pytest.param(16, 1, {}, marks=pytest.mark.slow),
        pytest.param(512, 1, {}, marks=pytest.mark.slow),
        (7, 3, FEW),
        (16, 1, FEW | {"loss": _all_terms(divisor="positions", proposable="base")} | EVERY_SECOND),
        (7, 3, FEW | {"loss": _all_terms(dpace=0.5)} | EVERY_SECOND),
        (16, 1, FEW | {"loss": _all_terms(divisor="weights", pairs="release")}),
        pytest.param(16, 1, {"loss": LossSpec(total_variation=20.0)}, marks=pytest.mark.slow),
    ],
)
def test_chunked_loss_and_gradient_equal_plain_autodiff(chunk, groups, changes):
    head, params = random_head()
    head = registry.head(dataclasses.replace(head.config, **({"loss": ALL_TERMS} | changes)))
    batch = random_batch()
    base_params = with_draft_rows(random_base(), head.config)
    frozen, hidden, states = random_states(base_params, batch, head.config.num_positions)

    def chunked(hidden):
        return distillation_loss(head, params, frozen, hidden, states, batch, chunk, groups)

    def plain(hidden):
        return plain_loss(head, params, frozen, hidden, states, batch)

    def with_gradient(loss):
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)

    (loss, parts), gradient = with_gradient(chunked)
    (plain_value, plain_parts), plain_gradient = with_gradient(plain)
    np.testing.assert_allclose(loss, plain_value, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(chunked)(hidden)[0], plain_value, rtol=1e-5)
    found = {**parts.terms._asdict(), "accuracy": parts.accuracy, "pairs": parts.pairs}
    for name, value in plain_parts.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(gradient, plain_gradient, atol=1e-6)
    assert jnp.abs(plain_gradient).max() > 1e-3


def test_the_cross_entropy_to_the_text_ends_with_the_document():
    head, params = random_head()
    head = with_loss(head, LossSpec(hard_ce=1.0))
    batch = random_batch(rows=1)
    frozen, hidden, states = random_states(random_base(), batch, head.config.num_positions)
    second = int(np.flatnonzero(batch.segment_ids[0] == 2)[0])
    # Where a document begins anew, the token is nobody's to predict.
    other = batch.replace(tokens=batch.tokens.at[0, second].add(1))

    @jax.jit
    def loss(batch):
        return distillation_loss(head, params, frozen, hidden, states, batch)[0]

    assert loss(other) == loss(batch)
    within = batch.replace(tokens=batch.tokens.at[0, second + 2].add(1))
    assert loss(within) != loss(batch)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(ALL_TERMS, id="decay"), pytest.param(DPACE, id="D-PACE", marks=pytest.mark.slow)],
)
def test_anchors_at_every_position_give_the_loss_of_all_positions(loss):
    head = registry.head(registry.config_for_base("medusa", TINY, loss=loss, **FEW))
    params = init_head(head, random_base(), jax.random.key(1))
    # One document of 19 tokens, all of which count.
    batch = random_batch(num_segments=1, padding=1)
    place = jnp.broadcast_to(jnp.arange(20), batch.tokens.shape)
    batch = batch.replace(loss_mask=place >= 0)
    frozen, hidden, states = random_states(random_base(), batch, head.config.num_positions)

    def with_gradient(anchors):
        def total(hidden):
            given = batch.replace(anchors=anchors)
            return distillation_loss(head, params, frozen, hidden, states, given, 7, 3)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(hidden)

    (value, parts), gradient = with_gradient(None)
    (found, found_parts), found_gradient = with_gradient(place + 1)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found_parts, parts)
    np.testing.assert_allclose(found_gradient, gradient, atol=1e-7)


def test_a_drafters_own_output_matrices_get_their_gradient():
    batch = random_batch()
    frozen, hidden, states = random_states(random_base(), batch, num_positions=3)
    config = dataclasses.replace(random_head()[0].config, num_positions=3, loss=ALL_TERMS)
    head = OwnMatrixHead(config)
    matrices = jax.random.normal(jax.random.key(5), (3, TINY.vocab_size, TINY.hidden_size))

    def by(loss):
        def value(params, hidden):
            return 2.5 * loss(head, params, frozen, hidden, states, batch)[0]

        return jax.jit(jax.grad(value, argnums=(0, 1)))({"heads": matrices}, hidden)

    chunked, plain = by(lambda *a: distillation_loss(*a, chunk=8)), by(plain_loss)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), chunked, plain)


def test_gradients_in_bfloat16_do_not_shrink_with_the_chunk():
    batch = random_batch(rows=200)
    states = random_states(random_base(), batch, num_positions=3)
    matrices = jax.random.normal(jax.random.key(5), (3, TINY.vocab_size, TINY.hidden_size))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (matrices, states))
    matrices, (frozen, hidden, states) = narrow
    loss = LossSpec(hard_ce=1.0, dpace=0.5)
    config = dataclasses.replace(random_head()[0].config, num_positions=3, loss=loss)

    def gradient(chunk):
        def value(params):
            head = OwnMatrixHead(config)
            return distillation_loss(head, params, frozen, hidden, states, batch, chunk)[0]

        return jax.jit(jax.grad(value))({"heads": matrices})["heads"].astype(jnp.float32)

    whole, parts = gradient(1 << 14), gradient(1)
    assert jnp.linalg.norm(parts - whole) < 0.004 * jnp.linalg.norm(whole)


def test_distributions_that_do_not_overlap_have_finite_losses_and_gradients():
    head, params = random_head()
    head = with_loss(head, DPACE)
    batch = random_batch()
    frozen, hidden, states = random_states(random_base(), batch, head.config.num_positions)

    def loss(hidden):
        return distillation_loss(head, params, frozen, hidden, 1000 * states, batch)

    (loss, parts), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(1000 * hidden)
    assert parts.terms.total_variation.max() > 0.9
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradient).all()


def test_packed_documents_lose_as_much_as_the_same_documents_unpacked():
    head, params = random_head()
    head = registry.head(dataclasses.replace(head.config, loss=DPACE, **FEW))
    packed = random_batch(rows=2, size=24, seed=3)
    unpacked = unpack(packed)
    total, parts = loss_of(head, params, packed)
    apart, parts_apart = loss_of(head, params, unpacked)
    np.testing.assert_array_equal(parts.pairs, parts_apart.pairs)
    np.testing.assert_allclose(parts.terms.soft_ce, parts_apart.terms.soft_ce, rtol=1e-5)
    np.testing.assert_allclose(parts.terms.hard_ce, parts_apart.terms.hard_ce, rtol=1e-5)
    np.testing.assert_allclose(total, apart, rtol=1e-5)


def test_no_gradient_reaches_the_base_and_every_head_parameter_gets_one():
    head, params = random_head()[0], lively_params()  # where it starts some matrices are 0
    batch = random_batch()

    def loss(params, base_params):
        return loss_of(head, params, batch, base_params)[0]

    by_head, by_base = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, random_base())
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_base):
        assert not leaf.any(), f"the base's {jax.tree_util.keystr(path)} gets a gradient"
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_head):
        assert leaf.any(), f"{jax.tree_util.keystr(path)} gets no gradient"


def test_teacher_states_receive_no_gradient():
    head, params = random_head()
    batch = random_batch()
    frozen, hidden, states = random_states(random_base(), batch, head.config.num_positions)

    def loss(states, frozen):
        return distillation_loss(head, params, frozen, hidden, states, batch)[0]

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(states, frozen)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_a_batch_without_pairs_has_loss_zero_and_no_nan():
    head, params = random_head()
    batch = random_batch().replace(loss_mask=jnp.zeros((3, 20), bool))
    frozen, hidden, states = random_states(random_base(), batch, head.config.num_positions)

    def value(hidden):
        return distillation_loss(head, params, frozen, hidden, states, batch)[0]

    loss, gradient = jax.jit(jax.value_and_grad(value))(hidden)
    assert loss == 0
    assert not gradient.any()


def with_loss(head, spec):
    return registry.head(dataclasses.replace(head.config, loss=spec))


def loss_of(head, params, batch, base_params=None):
    base_params = random_base() if base_params is None else base_params
    config = TrainStepConfig(TINY, head, OptimizerConfig(steps=1, warmup_steps=0), 16)
    return _taught_loss(config, params, base_params, batch)


@functools.partial(jax.jit, static_argnums=0)
def _taught_loss(config, params, base_params, batch):
    teacher = teach(config.base, base_params, config.head.config.features, batch)
    return head_loss(config, params, base_params, teacher, batch, jax.random.key(0))


def unpack(batch):
    """Return the same documents, one a row."""
    rows = []
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, int(batch.segment_ids.max()) + 1):
            at = np.flatnonzero(batch.segment_ids[row] == segment)
            rest = batch.tokens.shape[1] - len(at)
            pad = lambda x: np.pad(np.asarray(x)[row, at], (0, rest))  # noqa: B023, E731
            rows.append(jax.tree.map(pad, batch))
    unpacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    return unpacked.replace(segment_ids=(unpacked.segment_ids > 0).astype(jnp.int32))


def test_pairs_give_the_examples_of_the_docstrings():
    segments, yes, no = jnp.array([[1, 1, 1, 2]]), True, False
    arguments = jnp.array([[1, 1, 1, 1, 2]]), jnp.array([[no, yes, yes, yes, no]])
    mask = pair_mask(*arguments, num_positions=2)
    np.testing.assert_array_equal(mask[:, 0], [[no, yes, yes, no, no], [no, no, yes, no, no]])
    mask = pair_mask(*arguments, num_positions=2, convention="release")
    np.testing.assert_array_equal(mask[:, 0], [[no, no, yes, yes, no]] * 2)
    np.testing.assert_array_equal(labeled_targets(jnp.array([[1, 1, 2, 0]])), [[yes, no, no, no]])
    batch = Batch(segments, segments, segments, segments > 0)
    mask = anchored_mask(batch, jnp.array([[0, 1]]), num_positions=2)
    np.testing.assert_array_equal(mask, [[[yes, yes]], [[yes, no]]])
    targets = compact_targets(jnp.array([[[no, yes, no, yes]]]))
    np.testing.assert_array_equal(targets.index, [[1, 3, 0, 0]])
    np.testing.assert_array_equal(targets.rank, [[-1, 0, 0, 1]])
    np.testing.assert_array_equal(targets.count, [2])


def test_the_release_counts_a_pair_by_the_mask_of_the_position_before_its_target():
    segment_ids = jnp.ones((1, 5), jnp.int32)
    loss_mask = jnp.array([[False, False, True, False, True]])
    mask = pair_mask(segment_ids, loss_mask, num_positions=3, convention="release")
    # Only m_2 has a target: s = 3, for the pairs (2, 0), (1, 1), (0, 2).
    np.testing.assert_array_equal(mask[:, 0], [[False] * 3 + [True, False]] * 3)
    # Padding has no pairs.
    mask = pair_mask(jnp.zeros((2, 6), jnp.int32), jnp.ones((2, 6), bool), num_positions=2)
    assert not mask.any()


def test_anchors_are_supervised_tokens_that_their_document_goes_on_from():
    batch = random_batch(rows=2, size=40)
    possible = np.asarray(batch.loss_mask & labeled_targets(batch.segment_ids))
    all_of_row = np.asarray(sample_anchors(jax.random.key(0), batch, 64))
    some, others = (np.asarray(sample_anchors(jax.random.key(seed), batch, 5)) for seed in range(2))
    for row in range(2):
        # Where there are fewer, the last place of a row fills up; nothing is said there.
        assert sorted({*all_of_row[row].tolist()} - {39}) == np.flatnonzero(possible[row]).tolist()
        assert len(set(some[row].tolist())) == 5
        assert possible[row][some[row]].all()
    assert some.tolist() != others.tolist()
    assert not anchored_mask(batch, jnp.full((2, 1), 39), num_positions=3).any()


def test_each_group_of_rows_has_its_own_compact_targets():
    mask = jnp.array([[[False, True], [True, False], [False, False], [True, True]]])
    targets = compact_targets(mask, groups=2)
    np.testing.assert_array_equal(targets.index, [[1, 2, 0, 0], [2, 3, 0, 0]])
    np.testing.assert_array_equal(targets.rank, [[-1, 0], [1, 1], [-1, -1], [0, 1]])
    np.testing.assert_array_equal(targets.count, [2, 2])


ROWS, SIZE, POSITIONS = 2, 256, 5


@pytest.mark.slow
@pytest.mark.parametrize("base", ["shape:512x1x4096", "shape:256x1x16384"])
def test_chunks_cost_little_time(base, capsys):
    config = shape_config(base)
    head = registry.head(registry.config_for_base("clover2", config, num_positions=POSITIONS))
    base_params = base_shapes(config, jnp.float32)
    params = random_params(registry.init_shapes(head, base_params), seed=1)
    frozen = frozen_from_base(random_params(base_params, seed=0))
    batch = random_batch(ROWS, SIZE, config.vocab_size)
    # All targets count, so that both compute the same.
    batch = batch.replace(loss_mask=jnp.ones_like(batch.loss_mask))
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (POSITIONS, ROWS, SIZE, config.hidden_size))
    states = jax.random.normal(keys[1], (ROWS, SIZE, config.hidden_size))

    def timed(loss, **options):
        def value(hidden, frozen, states):
            return loss(head, params, frozen, hidden, states, batch, **options)

        compiled = jax.jit(jax.value_and_grad(value, has_aux=True))
        return functools.partial(compiled, hidden, frozen, states)

    runs = {str(size): timed(distillation_loss, chunk=size) for size in (64, 128, 256)}
    runs |= {"one chunk": timed(distillation_loss, chunk=ROWS * SIZE), "plain": timed(plain_loss)}
    values = {name: run()[0][0] for name, run in runs.items()}
    assert len({round(float(value), 3) for value in values.values()}) == 1
    seconds = time_in_turns(runs, rounds=5, single=runs)
    ratios = {name: round(taken / seconds["plain"], 3) for name, taken in seconds.items()}
    with capsys.disabled():
        print(json.dumps({"base": base, "plain_seconds": seconds["plain"], "ratios": ratios}))


def test_pairs_of_decoding_are_those_whose_draft_and_last_token_are_of_one_answer():
    # Two answers of one conversation, of two and three tokens, with the user's between.
    loss_mask = jnp.array([[0, 0, 1, 1, 0, 1, 1, 1]], bool)
    mask = pair_mask(jnp.ones((1, 8), jnp.int32), loss_mask, num_positions=3)
    drafted = [(int(s) - 1 - i, int(s) + 1) for i in range(3) for s in np.flatnonzero(mask[i, 0])]
    # (t, place of the drafted token): from the prompt's last position on, up to the answer's end.
    assert drafted == [(1, 3), (4, 6), (5, 7), (4, 7)]
