"""The one arithmetic through which every rule reaches Phi.

``result = round_half_even(scale * sum_i a_i * v_i)`` with integers ``a_i``, the sum in int64, and a single
IEEE double multiplication per element: the same bits on every machine. A rule chooses ``a_i`` such that
``a_i * |v_i|`` stays below 2**48, which leaves room for 2**14 authors of one round. No rule counts them: the
sum of more wraps, alike on every node. A liar with so many keys has the majority anyway.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import Sums
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints, sum_of_squares

SPARSE = 4
"""A sum of which less than a fourth is not 0 is kept as positions and values."""

PART = 1 << 17
"""Values summed at a time: an int64 sum of 1 MiB stays in cache. A multiple of `codecs.base.GRAIN`."""


class Vector(Protocol):
    """One delta's values of one tensor, readable in parts that begin at multiples of `PART`.

    See `payload.Section`, which is one.
    """

    numel: int

    def decode(self, start: int = 0, stop: int | None = None) -> Ints: ...

    def accumulate(self, start: int, factor: int, sums: Sums) -> None: ...


@dataclass(frozen=True, slots=True)
class Deltas:
    """One tensor's deltas in a round, in order of author, with what a rule may look at.

    `shrink` holds the factors (at most 1.0) by which clipping shortens each; weights are positive.
    `root_steps` are square roots of the inner steps of each window, to compare lengths by, and `usual` is the
    usual ``norm / root_steps`` (see `clipping`).
    """

    vectors: Sequence[Vector]
    weights: Sequence[float]
    norms: Sequence[float]
    shrink: Sequence[float]
    root_steps: Sequence[float]
    usual: float

    @property
    def numel(self) -> int:
        """Values of the tensor."""
        return self.vectors[0].numel

    def parts(self) -> Iterator[slice]:
        """The tensor from its start to its end."""
        for start in range(0, self.numel, PART):
            yield slice(start, min(start + PART, self.numel))


class Step(NamedTuple):
    """One part of what a rule makes of a tensor's deltas."""

    part: slice
    positions: npt.NDArray[np.intp] | None
    """Where in the part the values are; elsewhere the step is 0. None: everywhere."""
    values: Ints

    def add_to(self, tensor: Ints, sign: int) -> None:
        """Add or subtract it, int32[numel] in place; sums wrap."""
        target = tensor[self.part]
        place = slice(None) if self.positions is None else self.positions
        if sign > 0:
            target[place] += self.values
        else:
            target[place] -= self.values


Rule = Callable[[Deltas], Iterator[Step]]
"""Yields a tensor's step part by part, so that it need not be in memory as a whole."""

UNIT = 1 << 48
"""Length that the longest of stretched directions gets. Coefficients thus have 14 bits and more for every
norm below 2**34 (1024 in float), each for itself: a delta next to nothing must not, by its huge
``length / |v|``, round the coefficients of the others to 0 and have the direction to itself."""


class PartialSum(NamedTuple):
    """``sum_i a_i * v_i`` in one part of the tensor."""

    part: slice
    positions: npt.NDArray[np.intp] | None
    """Where in the part the values are; elsewhere the sum is 0. None: everywhere."""
    values: Sums


def combine(deltas: Deltas, coefficients: Sequence[int]) -> Iterator[PartialSum]:
    """Yield ``sum_i a_i * v_i`` part by part; at least one coefficient is positive.

    Sums of sparse deltas are mostly zeros, which are left out.
    """
    if not any(coefficients):
        raise ValueError("no delta with a positive coefficient")
    counted = [(v, a) for v, a in zip(deltas.vectors, coefficients, strict=True) if a]
    for part in deltas.parts():
        sums = np.zeros(part.stop - part.start, dtype=np.int64)
        for vector, coefficient in counted:
            vector.accumulate(part.start, coefficient, sums)
        is_set = sums != 0  # NumPy finds the set ones among booleans six times as fast
        if np.count_nonzero(is_set) < sums.size // SPARSE:
            positions = np.flatnonzero(is_set)
            yield PartialSum(part, positions, sums[positions])
        else:
            yield PartialSum(part, None, sums)


def stretched(deltas: Deltas, lengths: Sequence[float]) -> Iterator[PartialSum]:
    """``sum_i l_i * unit(v_i)``, in units in which the longest is `UNIT`; deltas of norm 0 have no direction.

    At least one length of a delta that is not 0 is positive.
    """
    pairs = list(zip(lengths, deltas.norms, strict=True))
    longest = max(length for length, n in pairs if n > 0.0)
    return combine(deltas, [round(UNIT * (length / longest / n)) if n > 0.0 else 0 for length, n in pairs])


def norm_of_sum(sums: Sequence[PartialSum]) -> float:
    """Euclidean norm of an int64 sum, from its 30 leading bits (floor), in the same units."""
    peak = max((_peak(sums_.values) for sums_ in sums), default=0)
    shift = max(0, peak.bit_length() - 30)
    squares = sum(sum_of_squares((sums_.values >> shift).astype(np.int32)) for sums_ in sums)
    return sqrt(squares) * float(1 << shift)


def _peak(values: Sums) -> int:
    return max(int(values.max()), -int(values.min())) if values.size else 0


def scaled(sums: Iterable[PartialSum], scale: float) -> Iterator[Step]:
    """``round_half_even(scale * sum)`` as int32, saturated at +-64 (never reached in health)."""
    for part, positions, values in sums:
        exact = np.multiply(values, scale, dtype=np.float64)
        np.rint(exact, out=exact)
        np.clip(exact, 1 - VALUE_LIMIT, VALUE_LIMIT - 1, out=exact)
        yield Step(part, positions, exact.astype(np.int32))


def no_step() -> Iterator[Step]:
    """What leaves Phi as it is."""
    return iter(())


def whole(steps: Iterable[Step], numel: int) -> Ints:
    """All of a tensor's step: int32[numel]."""
    result = np.zeros(numel, dtype=np.int32)
    for step in steps:
        step.add_to(result, 1)
    return result
