"""The one arithmetic through which every rule reaches Phi.

``result = round_half_even(scale * sum_i a_i * v_i)`` with integers ``a_i``, the sum in int64, and a single
IEEE double multiplication per element: the same bits on every machine. A rule chooses ``a_i`` such that
``a_i * |v_i|`` stays below 2**48, which leaves room for 2**14 authors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints, norm


@dataclass(frozen=True, slots=True)
class Deltas:
    """One tensor's deltas in a round, in order of author, with what a rule may look at.

    `shrink` holds the factors (at most 1.0) by which clipping shortens each; weights are positive.
    `root_steps` are square roots of the inner steps of each window, to compare lengths by.
    """

    decode: Callable[[int], Ints]
    weights: Sequence[float]
    norms: Sequence[float]
    shrink: Sequence[float]
    root_steps: Sequence[float]


Rule = Callable[[Deltas], Ints]

UNIT = 1 << 48
"""Length that the longest of stretched directions gets. Coefficients thus have 14 bits and more for every
norm below 2**34 (1024 in float), each for itself: a delta next to nothing must not, by its huge
``length / |v|``, round the coefficients of the others to 0 and have the direction to itself."""


def combine(deltas: Deltas, coefficients: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return ``sum_i a_i * v_i``; at least one coefficient is positive. Deltas are decoded one at a time."""
    summed: npt.NDArray[np.int64] | None = None
    for index, coefficient in enumerate(coefficients):
        if coefficient == 0:
            continue
        term = np.multiply(deltas.decode(index), np.int64(coefficient), dtype=np.int64)
        if summed is None:
            summed = term
        else:
            summed += term
    if summed is None:
        raise ValueError("no delta with a positive coefficient")
    return summed


def stretched(deltas: Deltas, lengths: Sequence[float]) -> npt.NDArray[np.int64]:
    """``sum_i l_i * unit(v_i)``, in units in which the longest is `UNIT`; deltas of norm 0 have no direction.

    At least one length of a delta that is not 0 is positive.
    """
    pairs = list(zip(lengths, deltas.norms, strict=True))
    longest = max(length for length, n in pairs if n > 0.0)
    return combine(deltas, [round(UNIT * (length / longest / n)) if n > 0.0 else 0 for length, n in pairs])


def norm_of_sum(summed: npt.NDArray[np.int64]) -> float:
    """Euclidean norm of an int64 sum, from its 30 leading bits (floor), in the same units."""
    peak = max(int(summed.max()), -int(summed.min()))
    shift = max(0, peak.bit_length() - 30)
    return norm((summed >> shift).astype(np.int32)) * float(1 << shift)


def scaled(summed: npt.NDArray[np.int64], scale: float) -> Ints:
    """``round_half_even(scale * summed)`` as int32, saturated at +-64 (never reached in health)."""
    result: npt.NDArray[Any] = np.rint(summed.astype(np.float64) * scale)
    np.clip(result, 1 - VALUE_LIMIT, VALUE_LIMIT - 1, out=result)
    return result.astype(np.int32)
