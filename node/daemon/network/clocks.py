"""Whether our clock is right, judged by the clocks of our peers.

Every chunk tells how far our clock is from its sender's, to about a second (see `links.clock_offset`).
"""

from collections.abc import Iterable
from statistics import median_high, median_low

PEERS_MIN = 3
"""With fewer peers it cannot be told whose clock is wrong."""

OFF_S = 30.0


def judge(offsets: Iterable[float | None]) -> str | None:
    """What to say of our clock, given those of our peers; None if there is nothing to say."""
    known = [offset for offset in offsets if offset is not None]
    if not known:
        return None
    off = min(median_low(known), median_high(known), key=abs)  # half of them, with ours, are a majority
    if abs(off) < OFF_S:
        return None
    if len(known) < PEERS_MIN:
        theirs = f"that of {len(known)} peer(s)"
        return f"this machine's clock and {theirs} differ by {abs(off):.0f} s, and one is wrong"
    which = "behind" if off > 0 else "ahead of"
    return f"this machine's clock is {abs(off):.0f} s {which} the clocks of {len(known)} peers"
