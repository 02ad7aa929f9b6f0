"""Which snapshot a joiner starts from, where members may lie about the past.

Nothing in a snapshot proves itself, and where keys are free a count of names proves little. What a joiner has
of its own is whom it was told of: the nodes at its join addresses. So those come first, unless they are alone
with what they say; and what others say against them is believed only if the user says so.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest

from gossamer.protocol import limits
from gossamer.protocol.claims import WITNESSES, Claim, most_of
from gossamer.protocol.effects import Effect, Notice, Prefetch
from gossamer.protocol.history.testimony import Witness
from gossamer.protocol.identity import short

REMIND_S = 15.0
PREFETCHES_MAX = 3
"""Snapshots that a joiner begins to fetch before it believes in one: a liar whose claim changes all the
time cannot make it fetch for ever."""

NAMED_TOLD_MAX = 4
"""So many members are named behind each of two claims that contradict each other."""


class Joining:
    """Listens to members' claims until there is one to start from."""

    def __init__(self, trusted: Collection[bytes] = ()) -> None:
        """`trusted` are node ids whose word alone counts, if the user has named any."""
        self._trusted = frozenset(trusted)
        self._heard_since: float | None = None
        self._reminded_at = 0.0
        self._prefetching: Claim | None = None
        self._prefetches = 0

    def choose(self, members: Sequence[Witness], now: float) -> tuple[Claim | None, list[Effect]]:
        """The claim to start from, None as long as there is none; and what to do and say meanwhile."""
        witnesses = [member for member in members if member.claims]
        if not witnesses:
            return None, []
        if self._heard_since is None:
            self._heard_since = now
        waited = now - self._heard_since
        if waited < limits.ROSTER_PATIENCE_S:
            return None, self._prefetch(witnesses) if waited >= limits.PREFETCH_AFTER_S else []
        best = self._best(witnesses, patient=waited < limits.NAMED_PATIENCE_S)
        return best, [] if best is not None else self._remind(witnesses, now)

    def prefers_another(self, claim: Claim, members: Sequence[Witness]) -> bool:
        """Whether we would by now start from another one."""
        return self._best([member for member in members if member.claims]) not in (claim, None)

    def _best(self, witnesses: Sequence[Witness], *, patient: bool = False) -> Claim | None:
        if self._trusted:
            return _newest(claim for w in witnesses if w.node_id in self._trusted for claim in w.claims)
        return believable(witnesses, patient=patient)

    def _prefetch(self, witnesses: Sequence[Witness]) -> list[Effect]:
        """Begin to fetch what most members claim while we hear of more of them.

        It is adopted only if it is believed in the end. If that is another, some bytes came for nothing.
        """
        if self._trusted:
            witnesses = [witness for witness in witnesses if witness.node_id in self._trusted]
        counts = Counter(claim for witness in witnesses for claim in set(witness.claims))
        best = max(counts, key=lambda claim: (counts[claim], claim), default=None)
        before = self._prefetching
        if best is None or self._prefetches >= PREFETCHES_MAX or (before and counts[before] >= counts[best]):
            return []
        self._prefetching = best
        self._prefetches += 1
        return [Prefetch(best)]

    def _remind(self, witnesses: Sequence[Witness], now: float) -> list[Effect]:
        if now - self._reminded_at < REMIND_S:
            return []
        self._reminded_at = now
        if self._trusted:
            return [Notice("waiting for a snapshot of a member named with --trust")]
        text = f"waiting for {len(witnesses)} members to agree on a snapshot to start from"
        return [Notice(text + _dispute(witnesses))]


def believable(witnesses: Sequence[Witness], *, patient: bool = False) -> Claim | None:
    """The claim to start from, None if there is none.

    1. The newest that a named member makes and, where there are three or more, another one with it: so
       names cannot outvote it, and it cannot lead us astray alone. Of several named members' that which more
       make: one of them may lie.
    2. Where named members make no such claim, unless we are `patient` with them: the newest that most make,
       or else the one that more make than any other. It must be one that `most_of` all make, and that nobody
       named contradicts, nor as many others.
    """
    support = Counter(claim for witness in witnesses for claim in set(witness.claims))
    named = {claim for witness in witnesses if witness.is_named for claim in witness.claims}
    needed = 1 if len(witnesses) < WITNESSES else 2
    newest = [
        _newest(claim for claim in w.claims if support[claim] >= needed) for w in witnesses if w.is_named
    ]
    vouched = max(filter(None, newest), key=lambda claim: (support[claim], claim), default=None)
    if vouched is not None or (named and patient):
        return vouched
    free = [claim for claim in _unrivalled(support, named) if support[claim] >= most_of(len(witnesses))]
    by_most = [claim for claim in free if 2 * support[claim] > len(witnesses)]
    return max(by_most) if by_most else max(free, key=lambda claim: (support[claim], claim), default=None)


def _newest(claims: Iterable[Claim]) -> Claim | None:
    return max(claims, default=None)


def _unrivalled(support: Mapping[Claim, int], named: Collection[Claim]) -> Iterator[Claim]:
    """Claims that more make than any other of the same round, where nobody named makes another."""
    by_round: dict[int, list[Claim]] = {}
    for claim in support:
        by_round.setdefault(claim.round, []).append(claim)
    for rivals in by_round.values():
        best, *next_best = nlargest(2, rivals, key=lambda claim: support[claim])
        is_alone = not next_best or support[best] > support[next_best[0]]
        if is_alone and not any(rival in named for rival in rivals if rival != best):
            yield best


def _dispute(witnesses: Sequence[Witness]) -> str:
    """Who contradicts whom, in words; empty where nobody does."""
    support = Counter(claim for witness in witnesses for claim in set(witness.claims))
    claimed = Counter(claim.round for claim in support)
    newest = max((round_ for round_, claims in claimed.items() if claims > 1), default=None)
    if newest is None:
        return ""
    sides = sorted((claim for claim in support if claim.round == newest), key=lambda c: (-support[c], c))
    said = "; others: ".join(_who(witnesses, side) for side in sides[:2])
    return f". They contradict each other about round {newest}: {said}. Name whom to believe: --trust NODE_ID"


def _who(witnesses: Sequence[Witness], claim: Claim) -> str:
    behind = sorted((w for w in witnesses if claim in w.claims), key=lambda w: (not w.is_named, w.node_id))
    names = [short(w.node_id) + " (at a join address)" * w.is_named for w in behind[:NAMED_TOLD_MAX]]
    more = f" and {len(behind) - NAMED_TOLD_MAX} more" if len(behind) > NAMED_TOLD_MAX else ""
    return ", ".join(names) + more
