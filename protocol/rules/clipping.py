"""Clipping: no delta is longer than a multiple of what is usual in its round.

Lengths are compared per square root of inner steps: an honest fast machine's longer window is a longer
random walk, and must not look like an attack.
"""

from collections.abc import Iterable, Sequence
from math import inf


def median_low(values: Iterable[float]) -> float:
    """The middle value, or the lower of the middle two: an honest member's as soon as those are half."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def ceiling(stated: Sequence[float], times: float) -> float:
    """So many times the low median of what members state: nobody's counts for more. 0 times: infinite."""
    return times * median_low(stated) if times and stated else inf


def usual_rate(lengths: Sequence[float], root_steps: Sequence[float]) -> float:
    """The low median of ``length / root_steps``, one vote each whatever its weight; infinite for one or none.

    Of two nobody can tell who is the odd one out, so the shorter is what is usual: an honest member loses
    part of one step by that, where a liar would gain the model. But zero says nothing against the other.
    """
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True)]
    if len(rates) < 2 or (len(rates) == 2 and 0.0 in rates):
        return inf
    return median_low(rates)


def shrink_to(limit: float, lengths: Sequence[float], root_steps: Sequence[float]) -> list[float]:
    """Factors, at most 1.0, that bring each ``length / root_steps`` down to a limit."""
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True)]
    return [limit / rate if rate > limit else 1.0 for rate in rates]
