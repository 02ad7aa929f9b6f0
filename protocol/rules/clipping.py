"""Clipping: no delta is longer than a multiple of what is usual in its round.

Lengths are compared per square root of inner steps: an honest fast machine's longer window is a longer
random walk, and must not look like an attack.
"""

from collections.abc import Iterable, Sequence
from math import inf

CLIP_RECORDS_MIN = 3
"""With fewer, a median says nothing about who is the odd one out."""


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def usual_rate(lengths: Sequence[float], root_steps: Sequence[float]) -> float:
    """The median of ``length / root_steps``, one vote each whatever its weight; infinite for fewer than 3."""
    if len(lengths) < CLIP_RECORDS_MIN:
        return inf
    return median(length / root for length, root in zip(lengths, root_steps, strict=True))


def shrink_to(limit: float, lengths: Sequence[float], root_steps: Sequence[float]) -> list[float]:
    """Factors, at most 1.0, that bring each ``length / root_steps`` down to a limit."""
    rates = [length / root for length, root in zip(lengths, root_steps, strict=True)]
    return [limit / rate if rate > limit else 1.0 for rate in rates]
