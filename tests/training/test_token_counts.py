"""The most frequent tokens of the data that the base is imitated on, and those always kept."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.data.records import TokenRow
from clover_jax.data.samples import RecordSamples
from clover_jax.errors import UserError
from clover_jax.training.setup import most_frequent, reduce_vocabulary
from tests.tiny_models import TINY, random_head


def test_only_what_the_base_is_imitated_on_is_counted():
    config = dataclasses.replace(TINY, eos_token_ids=())
    records = [TokenRow("a", (1, 2), (3, 3, 4)), TokenRow("b", (3,), (0,))]
    samples = RecordSamples(records, None, config.vocab_size, 32)
    head, _ = random_head(config, "medusa")
    base = BaseModel(config, {}, Path(), "random")
    for size, ids, coverage in ((1, (3,), 2 / 4), (2, (0, 3), 3 / 4), (4, (0, 1, 3, 4), 1)):
        reduced, share = reduce_vocabulary(head, size, base, None, samples)
        assert (reduced.config.draft_to_target, share) == (ids, coverage)


def test_equally_frequent_tokens_come_in_order_and_none_twice():
    assert most_frequent(np.array([5, 0, 3, 0, 9]), 3, [1]) == ((0, 1, 4), 14 / 17)
    assert most_frequent(np.array([1, 2, 2, 2]), 2, [2, 2])[0] == (1, 2)
    assert most_frequent(np.array([0, 0, 0]), 3)[0] == (0, 1, 2)
    assert most_frequent(np.array([0, 0]), 1)[1] == 0.0


@pytest.mark.parametrize("size", [2, 6])
def test_an_impossible_size_is_refused(size):
    message = rf"--draft_vocab={size} must lie between 3 \(the special tokens\) and 5, the base's"
    with pytest.raises(UserError, match=message):
        most_frequent(np.ones(5, np.int64), size, [0, 3, 4])
