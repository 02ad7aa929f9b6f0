"""Clipping: no delta is longer than a multiple of what is usual in its round.

Lengths are compared per square root of inner steps: an honest fast machine's longer window is a longer
random walk, and must not look like an attack.
"""

from collections.abc import Iterable, Sequence
from math import fsum, inf, sqrt


def median_low(values: Iterable[float]) -> float:
    """The middle value, or the lower of the middle two: an honest member's as soon as those are half."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def ceiling(stated: Sequence[float], times: float) -> float:
    """So many times the low median of what members state: nobody's counts for more. 0 times: infinite."""
    return times * median_low(stated) if times and stated else inf


def usual_rate(lengths: Sequence[float], root_steps: Sequence[float]) -> float:
    """The low median of ``length / root_steps`` where that is not 0, one vote each whatever its weight.

    Zero says nothing against the others: their experts, heads or layers are not trained everywhere. Infinite
    for one or none that is left. Of two nobody can tell who is the odd one out, so the shorter is what is
    usual: an honest member loses part of one step by that, where a liar would gain the model.
    """
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True) if length > 0.0]
    return median_low(rates) if len(rates) > 1 else inf


def usual_rates(
    norms: Sequence[Sequence[float]], sizes: Sequence[int], root_steps: Sequence[float]
) -> list[float]:
    """What is usual of each tensor; `norms` are by member and tensor, `sizes` the tensors' elements.

    Those who change a tensor judge it among themselves, and may be few, or one that lies. So no tensor's rate
    counts as usual beyond what is usual of whole deltas, were they everywhere what they are in the tensors
    that they change. Where all members change all tensors this bounds nothing: a whole is never shorter than
    its part.
    """
    usual = usual_rate([_length_everywhere(of_member, sizes) for of_member in norms], root_steps)
    by_tensor = ([of_member[index] for of_member in norms] for index in range(len(sizes)))
    return [min(usual, usual_rate(lengths, root_steps)) for lengths in by_tensor]


def _length_everywhere(norms: Sequence[float], sizes: Sequence[int]) -> float:
    """A delta's length, had what it leaves alone changed as much per element as what it changes."""
    changed = sum(size for norm, size in zip(norms, sizes, strict=True) if norm > 0.0)
    return sqrt(fsum(norm * norm for norm in norms) * (sum(sizes) / changed)) if changed else 0.0


def shrink_to(limit: float, lengths: Sequence[float], root_steps: Sequence[float]) -> list[float]:
    """Factors, at most 1.0, that bring each ``length / root_steps`` down to a limit."""
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True)]
    return [limit / rate if rate > limit else 1.0 for rate in rates]
