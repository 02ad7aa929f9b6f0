"""`rda`: radial-directional averaging, for weight matrices.

``(sum w |v| / sum w) * unit(sum w * unit(v))``: the mean length along the mean direction. Plain means of
nearly orthogonal deltas shrink with the square root of their number; RDA keeps the step's length when
participants come and go, so the outer learning rate needs no retuning (Decoupled DiLoCo, arXiv
2604.21428).
"""

from collections.abc import Iterator
from math import fsum, sqrt

from gossamer.protocol.rules.base import UNIT, Deltas, Step, norm_of_sum, scaled, stretched

RESULTANT_MIN = 0.5
"""Directions cancel each other if their sum is shorter than this part of what independent ones leave,
``sqrt(sum w**2)``. What remains then is no direction but a residue, of codecs and of rounded coefficients.
(The yardstick is not ``sum w``: 64 honest members with nothing in common leave an eighth of that.) In a
tensor of n elements, cosines of independent deltas scatter by ``1 / sqrt(n)``. Two deltas fall below this
bound at a cosine of -0.75, which for 80 elements is over 6 standard deviations away."""


def radial_directional(deltas: Deltas) -> Iterator[Step]:
    """Mean length times mean direction. Clipping shortens lengths and leaves directions alone.

    Where directions cancel, the step falls to 0 with their sum: the sum is divided by no less than
    `RESULTANT_MIN` of what independent directions would leave. Elsewhere this changes no bit.
    """
    heaviest = max(deltas.weights)
    shares = [w / heaviest for w in deltas.weights]
    lengths = [share * n * s for share, n, s in zip(shares, deltas.norms, deltas.shrink, strict=True)]
    # fsum rounds once, in whatever order and version of Python; sum guarantees neither.
    length = fsum(lengths) / fsum(shares)
    sums = list(stretched(deltas, deltas.weights))  # the whole tensor: its norm is needed before its values
    independent = UNIT * sqrt(fsum(share * share for share in shares))
    return scaled(sums, length / max(norm_of_sum(sums), RESULTANT_MIN * independent))
