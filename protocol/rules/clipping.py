"""Clipping: no delta may be longer than a multiple of what is usual in its round.

Lengths are compared per square root of inner steps: an honest fast machine's longer window is a longer
random walk, and must not look like an attack.
"""

from collections.abc import Iterable, Sequence
from math import fsum, inf, sqrt


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
