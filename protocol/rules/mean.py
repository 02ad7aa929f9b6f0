"""`mean`: the weighted mean, for embeddings, norms and biases."""

from collections.abc import Iterator
from math import fsum

from gossamer.protocol.rules.base import Deltas, Step, combine, scaled

COEFFICIENT_MAX = (1 << 14) - 1
"""Times values below 2**30. A delta that weighs less than 1/32766 of the heaviest does not count."""


def weighted_mean(deltas: Deltas) -> Iterator[Step]:
    """``sum w s v / sum w``, where `s` is the factor by which clipping shortened each delta.

    A clipped delta keeps its weight in the denominator: it is shortened, but counts no less.
    """
    importance = [w * s for w, s in zip(deltas.weights, deltas.shrink, strict=True)]
    largest = max(importance)
    coefficients = [round(COEFFICIENT_MAX * (share / largest)) for share in importance]
    return scaled(combine(deltas, coefficients), largest / (COEFFICIENT_MAX * fsum(deltas.weights)))
