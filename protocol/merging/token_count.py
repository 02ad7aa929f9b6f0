"""How many tokens a set of deltas counts for: what the swarm has trained on, for schedules and in claims.

Tokens are a claim like any other, and their sum would be whatever one liar makes of it, for good. So they
count as they weigh: in a delta too stale to be merged not at all, and where weights are capped, those of a
member for no more than as many times what is usual.

What is usual shows in a *stretch* of rounds, from one at which a snapshot is due to the next: in a single
round a liar may be alone. Members are compared by their tokens per delta there, one vote each however often
they published. A stretch is closed as a whole (see `claims.closable_round`), and whoever joins begins with
one: so the count of a set is the same whatever part of it is closed, and what is closed is just added.
"""

from collections.abc import Collection, Iterable
from heapq import nlargest
from math import inf

from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.merge import weight_of
from gossamer.protocol.records import Delta
from gossamer.protocol.rules.clipping import ceiling, median_low

USUAL_STRETCHES = 4
"""What is usual just now is the most that was in so many stretches: the newest has hardly begun."""


class _Stretch:
    """What the deltas of some rounds state."""

    def __init__(self) -> None:
        self.stated: dict[bytes, tuple[int, int]] = {}
        """Tokens and number of each member's deltas."""
        self.counted = 0

    def note(self, delta: Delta, sign: int) -> None:
        """A delta joins the others (`sign` 1), or leaves them (-1)."""
        tokens, deltas = self.stated.pop(delta.author, (0, 0))
        if deltas + sign:
            self.stated[delta.author] = tokens + sign * delta.body.tokens, deltas + sign

    def count(self, cap: float) -> int:
        """Tokens of all that count. In Python's integers and one IEEE multiplication a member."""
        most = ceiling([tokens // deltas for tokens, deltas in self.stated.values()], cap)
        return sum(int(min(tokens, most * deltas)) for tokens, deltas in self.stated.values())


class TokenCount:
    """The count of a set of deltas, kept up while the set changes.

    `total` depends on nothing but the set, which holds no two deltas of one author in one round.
    """

    def __init__(self, manifest: Manifest, deltas: Iterable[Delta] = ()) -> None:
        self._outer = manifest.outer
        self._fragments = manifest.layout.fragments
        self._every = manifest.history.snapshot_every
        self._stretches: dict[int, _Stretch] = {}
        self.total = 0
        self.change((), deltas)

    def stretch_of(self, round_: int) -> int:
        """Number of the stretch that a round belongs to: the first begins with round 1."""
        return (round_ - 1) // self._every

    def change(self, old: Iterable[Delta], new: Iterable[Delta]) -> None:
        """The deltas `old` leave the set, and `new` come into it."""
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
        """Tokens that the median member states per delta lately, some not asked; infinite if none is left."""
        found = []
        for number in nlargest(USUAL_STRETCHES, self._stretches):
            stated = self._stretches[number].stated.items()
            means = [tokens // deltas for author, (tokens, deltas) in stated if author not in but]
            found += [median_low(means)] if means else []
        return max(found, default=inf)

    def _weighs(self, delta: Delta) -> bool:
        """Whether a merge gives it any weight, if its payload decodes."""
        body, staleness = delta.body, delta.staleness(self._fragments)
        return weight_of(body.tokens, body.steps, staleness, self._outer.staleness_max) > 0.0
