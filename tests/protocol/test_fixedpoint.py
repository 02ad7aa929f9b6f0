"""Fixed point: exact where it says exact, rounded once where it rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, is_healthy, sum_of_squares, to_fixed, to_float

INT32 = st.integers(-(2**31), 2**31 - 1)
EXTREMES = (-(2**31), 2**31 - 1, -(2**31) + 1, -1, 0, 1, 0xFFFF, -0xFFFF, 0x8000, -0x10000, 2**16)


def _exact(values: np.ndarray) -> int:
    return sum(int(v) ** 2 for v in values.reshape(-1))


@given(
    hnp.arrays(
        np.int32, hnp.array_shapes(max_dims=3, max_side=20), elements=INT32 | st.sampled_from(EXTREMES)
    )
)
def test_sum_of_squares_is_exact(values):
    assert sum_of_squares(values) == _exact(values)


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("size", [1, 255, 4096, 2**20, 2**20 + 1])
def test_sum_of_squares_of_the_extremes(value, size):
    assert sum_of_squares(np.full(size, value, dtype=np.int32)) == size * value**2


@pytest.mark.parametrize("bits", range(9, 32))
def test_sum_of_squares_around_the_border_of_exact_dot_products(rng, bits):
    peak = min(2**bits, 2**31 - 1)
    values = rng.integers(-peak, peak, 2**20 + 77).astype(np.int32)
    wide = values.astype(np.int64)
    high, low = wide >> 16, wide & 0xFFFF  # int64 sums that cannot overflow, unlike those of squares
    expected = (int((high * high).sum()) << 32) + (int((high * low).sum()) << 17) + int((low * low).sum())
    assert sum_of_squares(values) == expected


@given(st.floats(-63.9, 63.9))
def test_to_fixed_rounds_half_to_even(value):
    fixed = int(to_fixed(np.array([value]))[0])
    assert fixed == round(value * ONE)


@pytest.mark.parametrize("value", [64.0, -64.0, np.nan, np.inf, -np.inf, 1e30])
def test_to_fixed_refuses_what_does_not_fit(value):
    with pytest.raises(DivergedError):
        to_fixed(np.array([0.0, value]))


@given(hnp.arrays(np.int32, st.integers(1, 50), elements=st.integers(-ONE, ONE)))
def test_floats_and_back_are_exact_up_to_one(values):
    assert np.array_equal(to_fixed(to_float(values)), values)


@given(hnp.arrays(np.int32, st.integers(1, 50), elements=INT32))
def test_float_image_is_the_nearest(values):
    assert np.array_equal(to_float(values), (values.astype(np.float64) / ONE).astype(np.float32))


@pytest.mark.parametrize("value", [VALUE_LIMIT, -VALUE_LIMIT, 2**31 - 1, -(2**31)])
def test_health(value):
    assert is_healthy(np.array([VALUE_LIMIT - 1, 1 - VALUE_LIMIT], dtype=np.int32))
    assert is_healthy(np.zeros(0, dtype=np.int32))
    assert not is_healthy(np.array([0, value], dtype=np.int32))
