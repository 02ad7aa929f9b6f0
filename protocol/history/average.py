"""The averaged model: the mean of Phi over roughly the last fifth of history, and exact as Phi is.

A learning rate that falls needs a horizon. A mean over the last part of a run at a constant rate does as well
or better, and needs none (Polyak and Juditsky, 1992; Shamir and Zhang, 2013). Which part is best hardly
depends on the task, but on how long the run is: about its last fifth, whenever one asks.

**Points.** Phi is taken at *points*, rounds that lie closer together early in a run: of 32 to 63 rounds each
is one, of 64 to 127 every second, of 128 to 255 every fourth, and so on. So there are 32 points an octave,
whatever the length of a run, and their cost goes to nothing.

**Stretches.** A quarter of an octave is a *stretch*: 8 points. As of round R, the average is a weighted mean
of Phi at the points of R's stretch up to R, each with weight 1, and at those of the stretch before, each with
the part of R's stretch that is still to come. So the older stretch fades as the newer one fills, and what is
averaged is always between an eighth and a quarter of the run.

**Two sums.** Two int32 sums of Phi, one a stretch, are all that is kept. They wrap, as Phi does. A record
that comes late changes Phi by some step from its round on, so it changes a sum by that step times the
sum's points from this round on: exactly, in any order. An average that rounds as it goes (an exponential one,
or ``bar += (phi - bar) * c``) could not take a step back that it has swallowed. What a sum stands for is
found relative to Phi as of R, since it is ``points * Phi`` plus a sum of differences, and that sum is right
while its magnitude is below 128: a value may be off Phi by 16 on average over the points of a stretch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gossamer.protocol.fixedpoint import Ints

_POINT_BITS = 6
_STRETCH_BITS = 3
"""A point differs from the next in the first so many binary digits of its round, a stretch in these."""


class Sums(NamedTuple):
    """Sums of Phi at points, as of a round: int32 each, modulo 2**32."""

    earlier: Ints
    """Over all points of the stretch before the round's."""
    current: Ints
    """Over the points of the round's stretch, up to it."""


def points(after: int, upto: int) -> Iterator[int]:
    """The points above round `after`, up to round `upto`, newest first."""
    point = _floor(upto, _POINT_BITS)
    while point > max(0, after):
        yield point
        point = _floor(point - 1, _POINT_BITS)


def counts(from_: int, upto: int) -> tuple[int, int]:
    """How many points from round `from_` on are in either of the sums as of round `upto`, as `Sums` has
    them."""
    current, earlier = _stretches(upto)
    inside = list(points(max(from_, earlier) - 1, upto))
    return sum(point < current for point in inside), sum(point >= current for point in inside)


def is_current(point: int, upto: int) -> bool | None:
    """In which sum as of round `upto` a point is: the current one, the earlier one, or None in neither."""
    current, earlier = _stretches(upto)
    return True if point >= current else False if point >= earlier else None


def carried(sums: Sums, since: int, upto: int) -> Sums:
    """Sums as of round `since` as those as of `upto`, which still lack all points after `since`."""
    was, becomes = _stretches(since)[0], _stretches(upto)
    if was == becomes[0]:
        return sums
    nothing = np.zeros_like(sums.current)
    return Sums(sums.current if was == becomes[1] else nothing.copy(), nothing)


def mean(phi: Ints, sums: Sums, upto: int) -> Ints:
    """The averaged model as of round `upto`: int32[n], rounded half to even.

    `phi`: Phi as of that round, int32[n]; `sums`: likewise. As of round 0 it is Phi_0.
    """
    if not upto:
        return phi.copy()
    earlier, current = counts(0, upto)
    full = sum(1 for _ in points(_stretches(upto)[0] - 1, _last(upto)))
    rest = full - current if earlier else 0
    whole = full * current + rest * earlier
    off = full * _difference(sums.current, phi, current)
    if rest:
        off += rest * _difference(sums.earlier, phi, earlier)
    share, left = np.divmod(off, whole)
    share += (2 * left > whole) | ((2 * left == whole) & (share & 1 == 1))
    return phi + share.astype(np.int32)


def _difference(total: Ints, phi: Ints, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The sum of how far Phi was off `phi` at `count` points, from the sum of Phi there: int64[n]."""
    return (total - np.int32(count) * phi).astype(np.int64)


def _floor(round_: int, bits: int) -> int:
    """The newest round up to this one of which only the first `bits` binary digits are not 0."""
    shift = max(0, round_.bit_length() - bits)
    return round_ >> shift << shift


def _stretches(round_: int) -> tuple[int, int]:
    """The first rounds of a round's stretch and of the one before; round 0 is before all stretches."""
    current = _floor(round_, _STRETCH_BITS)
    return current, _floor(current - 1, _STRETCH_BITS) if current > 1 else current


def _last(round_: int) -> int:
    """The last round of a round's stretch."""
    return _floor(round_, _STRETCH_BITS) + (1 << max(0, round_.bit_length() - _STRETCH_BITS)) - 1
