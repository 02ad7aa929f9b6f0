"""`rda`: radial-directional averaging, for weight matrices.

``(sum w |v| / sum w) * unit(sum w * unit(v))``: the mean length along the mean direction. Plain means of
nearly orthogonal deltas shrink with the square root of their number; RDA keeps the step's length when
participants come and go, so the outer learning rate needs no retuning (Decoupled DiLoCo, arXiv
2604.21428).
"""

from math import fsum

import numpy as np

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.rules.base import Deltas, combine, norm_of_sum, scaled

UNIT = 1 << 48
"""Length that the heaviest direction is stretched to. Coefficients thus have 14 bits and more for every
norm below 2**34 (1024 in float), each for itself: a delta next to nothing must not, by its huge
``w / |v|``, round the coefficients of the others to 0 and have the direction to itself."""


def radial_directional(deltas: Deltas) -> Ints:
    """Mean length times mean direction. Clipping shortens lengths and leaves directions alone."""
    pairs = list(zip(deltas.weights, deltas.norms, strict=True))
    heaviest = max((w for w, n in pairs if n > 0.0), default=0.0)
    if heaviest == 0.0:
        return np.zeros_like(deltas.decode(0))
    lengths = [w / heaviest * n * s for (w, n), s in zip(pairs, deltas.shrink, strict=True)]
    # fsum rounds once, whatever the order and the version of Python; sum does neither.
    length = fsum(lengths) / fsum(w / heaviest for w in deltas.weights)
    summed = combine(deltas, [round(UNIT * (w / heaviest / n)) if n > 0.0 else 0 for w, n in pairs])
    resultant = norm_of_sum(summed)
    return scaled(summed, length / resultant if resultant > 0.0 else 0.0)
