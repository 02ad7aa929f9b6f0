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

from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from math import inf, sqrt

from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import Contribution, weight_of
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.records import Delta
from gossamer.protocol.rules.clipping import ceiling, median_low, usual_rates

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


# --- Which deltas are outliers: far longer, or of far more tokens, than was usual lately.
#
# The only consequence is that an outlier's round waits for others' deltas (`core/held_back.py`), beside which
# it can be clipped and capped. So a node judges by what it has merged itself, and nodes may differ.

OUTLIER_TIMES = 8.0
"""A delta this many times as long as usual, or of this many times the usual tokens, is an outlier. Honest
deltas grow by less from round to round; one that grows by more only has to wait."""

USUAL_ROUNDS = 8
"""The usual length is the longest of this many rounds: the delta of a tensor with a single element is 8 times
as long as the one before it in a twelfth of all rounds, because that one was near zero."""


class UsualRates:
    """The lengths of the deltas of each fragment's last rounds, per square root of their inner steps."""

    def __init__(self, own_id: bytes) -> None:
        self._own_id = own_id
        self._rates: dict[int, dict[int, list[float]]] = {}
        """By fragment and by round merged: the usual rate of each tensor (see `clipping`)."""

    def note(self, round_: int, fragment: Fragment, contributions: Sequence[Contribution]) -> None:
        """A round has been merged from these deltas. A single delta counts as usual only if it is our own."""
        if not contributions or (len(contributions) == 1 and contributions[0].author != self._own_id):
            return
        root_steps = [sqrt(c.steps) for c in contributions]
        norms = [c.norms for c in contributions]
        rates = self._rates.setdefault(fragment.index, {})
        if len(contributions) == 1:
            rates[round_] = [norm / root_steps[0] for norm in norms[0]]
        else:
            rates[round_] = usual_rates(norms, [slot.numel for slot in fragment.slots], root_steps)
        if len(rates) > USUAL_ROUNDS:
            del rates[min(rates)]

    def are_known(self, fragment: Fragment) -> bool:
        """Whether any round of a fragment has shown its usual rates."""
        return fragment.index in self._rates

    def are_all_exceeded(self, fragment: Fragment, contributions: Sequence[Contribution]) -> bool:
        """Whether each of these deltas has a tensor that is far longer than usual. See `are_known` first."""
        rates = self._rates[fragment.index]
        usual = [
            max((rate for rate in known if 0.0 < rate < inf), default=inf)
            for known in zip(*rates.values(), strict=True)
        ]
        return all(
            any(n > OUTLIER_TIMES * rate * sqrt(c.steps) for n, rate in zip(c.norms, usual, strict=True))
            for c in contributions
        )


def of_ordinary_tokens(deltas: tuple[Delta, ...], count: TokenCount) -> tuple[Delta, ...]:
    """The deltas that do not state far more tokens than the deltas of others did lately."""
    most = OUTLIER_TIMES * count.usual(but={delta.author for delta in deltas})
    return tuple(delta for delta in deltas if delta.body.tokens <= most)
