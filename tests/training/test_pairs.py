import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.models.batch import Batch
from clover_jax.training import pairs
from tests.training.training_data import random_batch

# Op by op, every operation on every shape would be compiled by itself.
anchored_mask = jax.jit(pairs.anchored_mask, static_argnames="num_positions")
compact_targets = jax.jit(pairs.compact_targets, static_argnames="groups")
labelled_targets = jax.jit(pairs.labelled_targets)
pair_mask = jax.jit(pairs.pair_mask, static_argnames="num_positions")
sample_anchors = jax.jit(pairs.sample_anchors, static_argnums=2)


def test_pair_mask_gives_the_docstrings_example():
    segment_ids = jnp.array([[1, 1, 1, 2]])
    mask = pair_mask(segment_ids, jnp.ones((1, 4), bool), num_positions=2)
    expected = [[[False, True, True, False]], [[False, False, True, False]]]
    np.testing.assert_array_equal(mask, expected)


def test_a_pair_counts_by_the_mask_of_the_position_before_its_target():
    segment_ids = jnp.ones((1, 5), jnp.int32)
    loss_mask = jnp.array([[False, False, True, False, True]])
    mask = pair_mask(segment_ids, loss_mask, num_positions=3)
    # Only m_2 has a target: tau = 3, for the pairs (2, 0), (1, 1), (0, 2).
    np.testing.assert_array_equal(mask[:, 0], [[False] * 3 + [True, False]] * 3)


def test_padding_has_no_pairs():
    mask = pair_mask(jnp.zeros((2, 6), jnp.int32), jnp.ones((2, 6), bool), num_positions=2)
    assert not mask.any()


def test_labelled_targets_gives_the_docstrings_example():
    labelled = labelled_targets(jnp.array([[1, 1, 2, 0]]))
    np.testing.assert_array_equal(labelled, [[True, False, False, False]])


def test_anchored_mask_gives_the_docstrings_example():
    segments = jnp.array([[1, 1, 1, 2]])
    batch = Batch(segments, segments, segments, segments > 0)
    mask = anchored_mask(batch, jnp.array([[0, 1]]), num_positions=2)
    np.testing.assert_array_equal(mask, [[[True, True]], [[True, False]]])


def test_anchors_are_supervised_tokens_that_their_document_goes_on_from():
    batch = random_batch(rows=2, size=40)
    possible = np.asarray(batch.loss_mask & labelled_targets(batch.segment_ids))
    all_of_row = np.asarray(sample_anchors(jax.random.key(0), batch, 64))
    some, others = (np.asarray(sample_anchors(jax.random.key(seed), batch, 5)) for seed in range(2))
    for row in range(2):
        # Where there are fewer, the last place of a row fills up; nothing is said there.
        assert sorted({*all_of_row[row].tolist()} - {39}) == np.flatnonzero(possible[row]).tolist()
        assert len(set(some[row].tolist())) == 5
        assert possible[row][some[row]].all()
    assert some.tolist() != others.tolist()
    assert not anchored_mask(batch, jnp.full((2, 1), 39), num_positions=3).any()


def test_compact_targets_gives_the_docstrings_example():
    targets = compact_targets(jnp.array([[[False, True, False, True]]]))
    np.testing.assert_array_equal(targets.index, [[1, 3, 0, 0]])
    np.testing.assert_array_equal(targets.rank, [[-1, 0, 0, 1]])
    np.testing.assert_array_equal(targets.count, [2])


def test_each_group_of_rows_has_its_own_compact_targets():
    mask = jnp.array([[[False, True], [True, False], [False, False], [True, True]]])
    targets = compact_targets(mask, groups=2)
    np.testing.assert_array_equal(targets.index, [[1, 2, 0, 0], [2, 3, 0, 0]])
    np.testing.assert_array_equal(targets.rank, [[-1, 0], [1, 1], [-1, -1], [0, 1]])
    np.testing.assert_array_equal(targets.count, [2, 2])
