"""The one arithmetic through which every rule reaches Phi.

``result = round_half_even(scale * sum_i a_i * v_i)`` with integers ``a_i``, the sum in int64, and a single
IEEE double multiplication per element: the same bits on every machine. A rule chooses ``a_i`` such that
``a_i * |v_i|`` stays below 2**48, which leaves room for 2**14 authors in one round. No rule checks their
number: with more, the sum wraps, alike on every node. A liar with that many keys has the majority anyway.

Clipping: no delta may be longer than a multiple of what is usual in its round. Lengths are compared per
square root of inner steps: an honest fast machine's longer window is a longer random walk, and must not look
like an attack.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, inf, sqrt
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import Sums
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints, sum_of_squares

SPARSE = 4
"""A sum is kept as positions and values if fewer than one in this many of its elements are not 0."""

PART = 1 << 17
"""Values summed at a time: an int64 sum of 1 MiB stays in cache. A multiple of `codecs.base.GRAIN`."""


class Vector(Protocol):
    """One delta's values of one tensor, readable in parts that begin at multiples of `PART`.

    See `payloads.Section`, which is one.
    """

    numel: int

    def decode(self, start: int = 0, stop: int | None = None) -> Ints: ...

    def accumulate(self, start: int, factor: int, sums: Sums) -> None: ...


@dataclass(frozen=True, slots=True)
class Deltas:
    """One tensor's deltas in a round, in order of author, with what a rule may look at.

    `shrink` holds the factors (at most 1.0) by which clipping shortens each delta; weights and norms are
    positive: who left the tensor alone has no vote on it.
    `root_steps` are the square roots of the inner steps of each window, to compare lengths by, and `usual` is
    the usual ``norm / root_steps`` (see `usual_rates`).
    """

    vectors: Sequence[Vector]
    weights: Sequence[float]
    norms: Sequence[float]
    shrink: Sequence[float]
    root_steps: Sequence[float]
    usual: float

    @property
    def numel(self) -> int:
        """How many values the tensor has."""
        return self.vectors[0].numel

    def parts(self) -> Iterator[slice]:
        """Slices of `PART` values that cover the tensor from its start to its end."""
        for start in range(0, self.numel, PART):
            yield slice(start, min(start + PART, self.numel))


class Step(NamedTuple):
    """One part of the step that a rule makes of a tensor's deltas."""

    part: slice
    positions: npt.NDArray[np.intp] | None
    """Where in the part the values are; elsewhere the step is 0. None: everywhere."""
    values: Ints

    def add_to(self, tensor: Ints, sign: int) -> None:
        """Add the step to `tensor`, int32[numel], in place, or subtract it (`sign` -1); sums wrap."""
        target = tensor[self.part]
        place = slice(None) if self.positions is None else self.positions
        if sign > 0:
            target[place] += self.values
        else:
            target[place] -= self.values


Rule = Callable[[Deltas], Iterator[Step]]
"""Yields a tensor's step part by part, so that it need not be in memory as a whole."""

UNIT = 1 << 48
"""The length that the longest of the stretched directions gets. So each coefficient has 14 bits or more of
its own for every norm below 2**34 (1024 in float): a delta of next to nothing must not, by its huge
``length / |v|``, round the coefficients of the others to 0 and set the direction alone."""


class PartialSum(NamedTuple):
    """``sum_i a_i * v_i`` in one part of the tensor."""

    part: slice
    positions: npt.NDArray[np.intp] | None
    """Where in the part the values are; elsewhere the sum is 0. None: everywhere."""
    values: Sums


def combine(deltas: Deltas, coefficients: Sequence[int]) -> Iterator[PartialSum]:
    """Yield ``sum_i a_i * v_i`` part by part; at least one coefficient is positive.

    Sums of sparse deltas are mostly zeros; these are left out.
    """
    if not any(coefficients):
        raise ValueError("no delta with a positive coefficient")
    counted = [(v, a) for v, a in zip(deltas.vectors, coefficients, strict=True) if a]
    for part in deltas.parts():
        sums = np.zeros(part.stop - part.start, dtype=np.int64)
        for vector, coefficient in counted:
            vector.accumulate(part.start, coefficient, sums)
        is_set = sums != 0  # in an array of booleans, NumPy finds the true ones six times as fast
        if np.count_nonzero(is_set) < sums.size // SPARSE:
            positions = np.flatnonzero(is_set)
            yield PartialSum(part, positions, sums[positions])
        else:
            yield PartialSum(part, None, sums)


def stretched(deltas: Deltas, lengths: Sequence[float]) -> Iterator[PartialSum]:
    """``sum_i l_i * unit(v_i)``, scaled so that the longest is `UNIT`; at least one length is positive."""
    longest, pairs = max(lengths), zip(lengths, deltas.norms, strict=True)
    return combine(deltas, [round(UNIT * (length / longest / n)) for length, n in pairs])


def norm_of_sum(sums: Sequence[PartialSum]) -> float:
    """Euclidean norm of an int64 sum, from its 30 leading bits (floor), in the units of the sum."""
    peak = max((_peak(sums_.values) for sums_ in sums), default=0)
    shift = max(0, peak.bit_length() - 30)
    squares = sum(sum_of_squares((sums_.values >> shift).astype(np.int32)) for sums_ in sums)
    return sqrt(squares) * float(1 << shift)


def _peak(values: Sums) -> int:
    return max(int(values.max()), -int(values.min())) if values.size else 0


def scaled(sums: Iterable[PartialSum], scale: float) -> Iterator[Step]:
    """``round_half_even(scale * sum)`` as int32, saturated at +-64 (which no healthy run reaches)."""
    for part, positions, values in sums:
        exact = np.multiply(values, scale, dtype=np.float64)
        np.rint(exact, out=exact)
        np.clip(exact, 1 - VALUE_LIMIT, VALUE_LIMIT - 1, out=exact)
        yield Step(part, positions, exact.astype(np.int32))


def no_step() -> Iterator[Step]:
    """A step that leaves Phi as it is."""
    return iter(())


def whole(steps: Iterable[Step], numel: int) -> Ints:
    """A tensor's whole step: int32[numel]."""
    result = np.zeros(numel, dtype=np.int32)
    for step in steps:
        step.add_to(result, 1)
    return result


def median_low(values: Iterable[float]) -> float:
    """The middle value, or the lower of the middle two: no higher than an honest one once half are honest."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def ceiling(stated: Sequence[float], times: float) -> float:
    """`times` the low median of what members state: none counts for more. Infinite if `times` is 0."""
    return times * median_low(stated) if times and stated else inf


def usual_rate(lengths: Sequence[float], root_steps: Sequence[float]) -> float:
    """The low median of ``length / root_steps`` where that is not 0, one vote each whatever the weight.

    A zero says nothing against the others: their experts, heads or layers are not trained everywhere.
    Infinite if only one or none is left. Of two, nobody can tell which is the odd one out, so the shorter is
    the usual one: an honest member loses part of one step by that, where a liar would gain the model.
    """
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True) if length > 0.0]
    return median_low(rates) if len(rates) > 1 else inf


def usual_rates(
    norms: Sequence[Sequence[float]], sizes: Sequence[int], root_steps: Sequence[float]
) -> list[float]:
    """The usual rate of each tensor; `norms` are by member and tensor, `sizes` count the tensors' elements.

    The members that change a tensor set its usual rate among themselves, and may be few, or a single liar. So
    no tensor's usual rate may exceed that of whole deltas, taken as if each delta had changed every tensor as
    much as those that it did change. Where all members change all tensors, this bounds nothing: a whole is
    never shorter than its part.
    """
    usual = usual_rate([_length_everywhere(of_member, sizes) for of_member in norms], root_steps)
    by_tensor = ([of_member[index] for of_member in norms] for index in range(len(sizes)))
    return [min(usual, usual_rate(lengths, root_steps)) for lengths in by_tensor]


def _length_everywhere(norms: Sequence[float], sizes: Sequence[int]) -> float:
    """A delta's length if the tensors that it leaves alone had changed as much per element as the others."""
    changed = sum(size for norm, size in zip(norms, sizes, strict=True) if norm > 0.0)
    return sqrt(fsum(norm * norm for norm in norms) * (sum(sizes) / changed)) if changed else 0.0


def shrink_to(limit: float, lengths: Sequence[float], root_steps: Sequence[float]) -> list[float]:
    """Factors, at most 1.0, that bring each ``length / root_steps`` down to `limit` or below."""
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True)]
    return [limit / rate if rate > limit else 1.0 for rate in rates]
