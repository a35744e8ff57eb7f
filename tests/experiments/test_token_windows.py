"""Windows of a token stream: every token predicted once, from what precedes it."""

import numpy as np
import pytest

from clover_jax.errors import UserError
from experiments.tiny_base.settings import BLOCK
from experiments.tiny_base.token_windows import TokenStream, cut_windows

BOS, EOS = 0, 1


def make_stream(seed=0, blocks=2):
    rng = np.random.default_rng(7)
    documents = [rng.integers(3, 100, size) for size in (5000, 700, 40, 3000, 1500)]
    return TokenStream(documents, bos=BOS, eos=EOS, blocks=blocks, seed=seed)


def test_cut_windows_example():
    windows = cut_windows(np.array([[5, 0, 7]]), bos=0)
    np.testing.assert_array_equal(windows.inputs, [[0, 5, 0]])
    np.testing.assert_array_equal(windows.segment_ids, [[1, 1, 2]])
    np.testing.assert_array_equal(windows.weights, [[1, 0, 1]])


def test_short_windows_hold_the_same_targets_as_long_ones():
    stream = make_stream()
    long, short = stream.batch(1, BLOCK), stream.batch(1, 256)
    assert short.inputs.shape == (8, 256)
    np.testing.assert_array_equal(long.targets.ravel(), short.targets.ravel())
    assert (short.inputs[:, 0] == BOS).all()


def test_batches_depend_on_the_step_alone():
    one, other = make_stream(), make_stream()
    later = one.steps_per_epoch + 1
    for step in range(later):
        one.batch(step, 512)
    np.testing.assert_array_equal(one.batch(later, 512).inputs, other.batch(later, 512).inputs)


def test_an_epoch_predicts_no_token_twice_and_epochs_differ():
    stream = make_stream(blocks=1)
    epochs = [
        np.concatenate([stream.batch(e * n + s, BLOCK).targets for s in range(n)])
        for n in [stream.steps_per_epoch]
        for e in range(2)
    ]
    assert len(np.unique(epochs[0], axis=0)) == stream.steps_per_epoch
    assert (epochs[0] != epochs[1]).any()


def test_too_little_text_is_refused():
    with pytest.raises(UserError, match=r"hold 102 tokens.*needs at least 3072"):
        TokenStream([np.full(100, 5)], bos=BOS, eos=EOS, blocks=2, seed=0)


def test_window_lengths_must_divide_the_block():
    with pytest.raises(ValueError, match="300"):
        make_stream().batch(0, 300)
