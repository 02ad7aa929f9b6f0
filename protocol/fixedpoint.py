"""Phi's arithmetic: int32 fixed point with 24 fractional bits.

Range +-128, resolution 2**-24 (6e-8). Integer addition commutes and wraps, so a sum of merges has one value,
in whatever order they arrived.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.protocol.errors import DivergedError

FRACTION_BITS = 24
ONE = 1 << FRACTION_BITS
VALUE_LIMIT = 1 << 30
"""Magnitude (64.0) at and beyond which a parameter counts as diverged; decoded deltas lie below it too."""

Ints = npt.NDArray[np.int32]

_ROW = 8192
"""Values in one dot product: too few for BLAS to spread over threads."""

_ROWS = 8
"""Dot products taken at once: so few that their values stay in cache."""


def to_fixed(values: npt.NDArray[Any]) -> Ints:
    """Round floats to fixed point, half to even. Raises DivergedError outside +-64 or on NaN."""
    scaled = np.rint(np.asarray(values, dtype=np.float64) * ONE)
    if not np.all(np.abs(scaled) < VALUE_LIMIT):
        raise DivergedError("a value is not finite or outside +-64, the limits of fixed point")
    return scaled.astype(np.int32)


def to_float(values: Ints) -> npt.NDArray[np.float32]:
    """Return the float32 image of fixed-point values (exact below 2**24 units, nearest above)."""
    return values.astype(np.float32) * np.float32(1.0 / ONE)


def is_healthy(values: Ints) -> bool:
    """Whether all magnitudes are below 64: no healthy weight reaches that."""
    return not values.size or max(int(values.max()), -int(values.min())) < VALUE_LIMIT


def sum_of_squares(values: Ints) -> int:
    """Return the exact sum of squares as a Python int.

    Squares are summed by float64 dot products of short rows, so that every partial sum is an integer below
    2**53: no order of summation can round it.
    """
    flat = values.reshape(-1)
    whole = flat.size // _ROW * _ROW
    rows = flat[:whole].reshape(-1, _ROW)
    found = sum(_sum_of_rows(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS))
    return found + (_sum_of_rows(flat[None, whole:]) if whole < flat.size else 0)


def _sum_of_rows(rows: Ints) -> int:
    peak = max(int(rows.max()), -int(rows.min()))
    if _ROW * peak * peak < 1 << 53:
        wide = rows.astype(np.float64)
        return _dots(wide, wide)
    # A high and a low half of 16 bits each: their products are below 2**32, 2**13 of them below 2**53.
    high = (rows >> 16).astype(np.float64)
    low = (rows & 0xFFFF).astype(np.float64)
    return (_dots(high, high) << 32) + (_dots(high, low) << 17) + _dots(low, low)


def _dots(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> int:
    return sum(map(int, np.vecdot(left, right)))
