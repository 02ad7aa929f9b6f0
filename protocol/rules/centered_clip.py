"""`centered-clip`: the mean of deltas clipped around a centre, for swarms that expect hostile members.

Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333)::

    v_{l+1} = v_l + sum_i p_i (x_i - v_l) min(1, tau_l / |x_i - v_l|)

with ``p = w / sum w``. However long a delta is, it moves the centre by at most ``p * tau`` per iteration. The
radius ``tau`` is the median distance, with one vote per member, so it lies among the honest members'
distances as long as these are more than half. (The paper's fixed radius would have to be known beforehand.)
The radius never grows: otherwise a centre that was drawn away from the majority would widen it, and be drawn
further. We keep no state between rounds (Phi is a function of each round's set), so the centre starts at 0.
There the distances are the norms, which are known already, and the first iteration is ordinary clipping at
the median norm.

Every centre is a combination ``sum c_i x_i`` of the deltas themselves, with ``c >= 0`` and ``sum c <= 1``. So
iterating changes scalars only, and each centre is turned into integers by the arithmetic of `base`.
"""

from collections.abc import Iterator, Sequence
from math import fsum, sqrt

from gossamer.protocol.fixedpoint import Ints, sum_of_squares
from gossamer.protocol.rules.base import (
    UNIT,
    Deltas,
    Step,
    median_low,
    scaled,
    shrink_to,
    stretched,
    whole,
)

ITERATIONS = 3
"""Each iteration costs two passes over the deltas, the first only one. Each multiplies the distance to the
limit of the iteration by the hostile share of the weight: with a quarter hostile, three bring it to 1/64."""


def centered_clip(deltas: Deltas) -> Iterator[Step]:
    """The centre after `ITERATIONS`; for two deltas, the mean of both, each at the shorter one's length.

    `Deltas.shrink` is ignored: the radius here is tighter than any clip of 1 or more. Distances are compared
    per square root of steps, like norms in clipping.
    """
    total = fsum(deltas.weights)
    shares = [weight / total for weight in deltas.weights]
    coefficients = [0.0] * len(shares)
    distances = deltas.norms
    radius = deltas.usual
    for iteration in range(ITERATIONS if len(shares) > 2 else 1):
        if iteration:
            distances = _distances(deltas, whole(_combination(deltas, coefficients), deltas.numel))
            rates = (far / root for far, root in zip(distances, deltas.root_steps, strict=True))
            radius = min(radius, median_low(rates))
        reach = shrink_to(radius, distances, deltas.root_steps)
        pulls = [share * factor for share, factor in zip(shares, reach, strict=True)]
        kept = max(0.0, 1.0 - fsum(pulls))
        coefficients = [kept * c + pull for c, pull in zip(coefficients, pulls, strict=True)]
    return _combination(deltas, coefficients)


def _combination(deltas: Deltas, coefficients: Sequence[float]) -> Iterator[Step]:
    """``sum_i c_i x_i``, with one rounding per element."""
    lengths = [c * n for c, n in zip(coefficients, deltas.norms, strict=True)]
    return scaled(stretched(deltas, lengths), max(lengths) / UNIT)


def _distances(deltas: Deltas, centre: Ints) -> list[float]:
    """``|x_i - centre|``; both are below 2**30, so a difference fits int32 and its norm is exact."""
    squares = [0] * len(deltas.vectors)
    for part in deltas.parts():
        for index, vector in enumerate(deltas.vectors):
            squares[index] += sum_of_squares(vector.decode(part.start, part.stop) - centre[part])
    return [sqrt(found) for found in squares]
