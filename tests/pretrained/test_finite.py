"""Infinities and NaN are found in every type that weights have."""

import ml_dtypes
import numpy as np
import pytest

from clover_jax.errors import UserError
from clover_jax.pretrained.tensor_files import check_finite, is_finite

TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_is_found(dtype, value):
    largest = ml_dtypes.finfo(dtype).max
    array = np.full((3, 400_000), largest, dtype)  # more than one chunk
    array[0, :4] = [-largest, 0, -0.0, ml_dtypes.finfo(dtype).smallest_subnormal]
    assert is_finite(array)
    for place in [(0, 0), (2, 399_999)]:
        spoilt = array.copy()
        spoilt[place] = value
        assert not is_finite(spoilt)
        assert not is_finite(spoilt.T)


def test_integers_and_nothing_are_finite():
    assert is_finite(np.full(3, -1, np.int64))
    assert is_finite(np.ones(3, bool))
    assert is_finite(np.zeros((0, 4), np.float32))


def test_the_tensor_is_named(tmp_path):
    message = "draft: tensor fc.weight holds values that are not finite numbers"
    with pytest.raises(UserError, match=message):
        check_finite(np.array([1, np.inf]), "fc.weight", tmp_path / "draft")
