"""How many tokens a set of deltas counts for: what the swarm has trained on, for schedules and in claims.

Tokens are a claim like any other, and one liar could make any number of their sum, for good. So tokens count
as they weigh: not at all in a delta that is too stale to be merged, and where weights are capped, a member's
count for at most `weight_cap` times what is usual.

What is usual is taken over a *stretch* of rounds, from one round at which a snapshot is due to the next,
since in a single round a liar may be alone. Members are compared by their tokens per delta there, with one
vote each however often they published. A stretch is closed as a whole (see `claims.closable_round`), and a
joiner begins at the start of one. So the count of a set is the same whatever part of it is closed, and that
of the closed part is just added.
"""

from collections.abc import Collection, Iterable
from heapq import nlargest
from math import inf

from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.merge import weight_of
from gossamer.protocol.records import Delta
from gossamer.protocol.rules.clipping import ceiling, median_low

USUAL_STRETCHES = 4
"""What is usual just now is the largest value of this many stretches: the newest has hardly begun."""


class _Stretch:
    """What the deltas of one stretch of rounds state."""

    def __init__(self) -> None:
        self.stated: dict[bytes, tuple[int, int]] = {}
        """The tokens of each member's deltas together, and the number of these deltas."""
        self.counted = 0

    def note(self, delta: Delta, sign: int) -> None:
        """A delta joins the stretch (`sign` 1), or leaves it (-1)."""
        tokens, deltas = self.stated.pop(delta.author, (0, 0))
        if deltas + sign:
            self.stated[delta.author] = tokens + sign * delta.body.tokens, deltas + sign

    def count(self, cap: float) -> int:
        """The tokens that count. Python integers and one IEEE multiplication per member."""
        most = ceiling([tokens // deltas for tokens, deltas in self.stated.values()], cap)
        return sum(int(min(tokens, most * deltas)) for tokens, deltas in self.stated.values())


class TokenCount:
    """The count of a set of deltas, kept up to date while the set changes.

    `total` depends on nothing but the set, which never holds two deltas of one author for one round.
    """

    def __init__(self, manifest: Manifest, deltas: Iterable[Delta] = ()) -> None:
        self._outer = manifest.outer
        self._fragments = manifest.layout.fragments
        self._every = manifest.history.snapshot_every
        self._stretches: dict[int, _Stretch] = {}
        self.total = 0
        self.change((), deltas)

    def stretch_of(self, round_: int) -> int:
        """The number of the stretch that a round belongs to. The first one begins with round 1."""
        return (round_ - 1) // self._every

    def change(self, old: Iterable[Delta], new: Iterable[Delta]) -> None:
        """Remove the deltas `old` from the set, and add `new`."""
        touched = set()
        for deltas, sign in ((old, -1), (new, 1)):
            for delta in filter(self._weighs, deltas):
                number = self.stretch_of(delta.round)
                self._stretches.setdefault(number, _Stretch()).note(delta, sign)
                touched.add(number)
        total = self.total
        for number in touched:
            stretch = self._stretches[number]
            before, stretch.counted = stretch.counted, stretch.count(self._outer.weight_cap)
            total += stretch.counted - before
            if not stretch.stated:
                del self._stretches[number]
        self.total = total  # at once: others read it while a merge is under way

    def usual(self, but: Collection[bytes]) -> float:
        """Tokens that the median member outside `but` states per delta lately; infinite if there is none."""
        found = []
        for number in nlargest(USUAL_STRETCHES, self._stretches):
            stated = self._stretches[number].stated.items()
            means = [tokens // deltas for author, (tokens, deltas) in stated if author not in but]
            found += [median_low(means)] if means else []
        return max(found, default=inf)

    def _weighs(self, delta: Delta) -> bool:
        """Whether a merge gives a delta any weight, provided that its payload decodes."""
        body, staleness = delta.body, delta.staleness(self._fragments)
        return weight_of(body.tokens, body.steps, staleness, self._outer.staleness_max) > 0.0
