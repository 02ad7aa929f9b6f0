"""Which snapshot a joiner starts from, where members may lie about the past.

Nothing in a snapshot proves itself, and where keys are free a count of node ids proves little. The one thing
that a joiner knows by itself is which nodes it was told of: those at its join addresses. So these come first,
unless they are alone with what they say. What others say against them is believed only if the user says so.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest

from gossamer.protocol import limits
from gossamer.protocol.claims import WITNESSES, Claim, quorum
from gossamer.protocol.effects import Effect, Notice, Prefetch
from gossamer.protocol.history.testimony import Witness
from gossamer.protocol.identity import short

REMIND_S = 15.0
PREFETCHES_MAX = 3
"""Snapshots that a joiner begins to fetch before it believes in one: a liar that changes its claim all the
time cannot make it fetch for ever."""

NAMED_TOLD_MAX = 4
"""How many members are named for each of two claims that contradict each other."""


class Joining:
    """Listens to members' claims until there is one to start from."""

    def __init__(self, trusted: Collection[bytes] = ()) -> None:
        """`trusted`: the node ids that the user has named, if any; then only their word counts."""
        self._trusted = frozenset(trusted)
        self._heard_since: float | None = None
        self._reminded_at = 0.0
        self._prefetching: Claim | None = None
        self._prefetches = 0

    def choose(self, members: Sequence[Witness], now: float) -> tuple[Claim | None, list[Effect]]:
        """The claim to start from, None as long as there is none, and what to do and say meanwhile."""
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
        """Whether we would start from another claim by now."""
        return self._best([member for member in members if member.claims]) not in (claim, None)

    def _best(self, witnesses: Sequence[Witness], *, patient: bool = False) -> Claim | None:
        if self._trusted:
            return _newest(claim for w in witnesses if w.node_id in self._trusted for claim in w.claims)
        return believable(witnesses, patient=patient)

    def _prefetch(self, witnesses: Sequence[Witness]) -> list[Effect]:
        """Begin to fetch what most members claim while we hear of more members.

        The snapshot is adopted only if it is believed in the end. If another one is, some bytes came in vain.
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
            return [Notice("waiting for a snapshot from a member named with --trust")]
        text = f"waiting for {len(witnesses)} members to agree on a snapshot to start from"
        return [Notice(text + _dispute(witnesses))]


def believable(witnesses: Sequence[Witness], *, patient: bool = False) -> Claim | None:
    """The claim to start from, None if there is none.

    1. The newest claim that a named member makes and, where there are three or more witnesses, another one
       too: so free node ids cannot outvote a named member, and it cannot lead us astray alone. If several
       named members make such claims, the claim with more witnesses: a named member may lie.
    2. Where named members make no such claim, unless we are `patient` with them: the newest claim that most
       witnesses make, or else the one that more make than any other. It must be one that a `quorum` of all
       make, and that neither a named member nor as many others contradict.
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
    free = [claim for claim in _unrivalled(support, named) if support[claim] >= quorum(len(witnesses))]
    by_most = [claim for claim in free if 2 * support[claim] > len(witnesses)]
    return max(by_most) if by_most else max(free, key=lambda claim: (support[claim], claim), default=None)


def _newest(claims: Iterable[Claim]) -> Claim | None:
    return max(claims, default=None)


def _unrivalled(support: Mapping[Claim, int], named: Collection[Claim]) -> Iterator[Claim]:
    """Claims with more witnesses than any other for the same round, where no named member makes another."""
    by_round: dict[int, list[Claim]] = {}
    for claim in support:
        by_round.setdefault(claim.round, []).append(claim)
    for rivals in by_round.values():
        best, *next_best = nlargest(2, rivals, key=lambda claim: support[claim])
        is_alone = not next_best or support[best] > support[next_best[0]]
        if is_alone and not any(rival in named for rival in rivals if rival != best):
            yield best


def _dispute(witnesses: Sequence[Witness]) -> str:
    """Which members contradict which, in words; empty if none do."""
    support = Counter(claim for witness in witnesses for claim in set(witness.claims))
    claimed = Counter(claim.round for claim in support)
    newest = max((round_ for round_, claims in claimed.items() if claims > 1), default=None)
    if newest is None:
        return ""
    sides = sorted((claim for claim in support if claim.round == newest), key=lambda c: (-support[c], c))
    said = "; others: ".join(_who(witnesses, side) for side in sides[:2])
    return f". They contradict each other about round {newest}: {said}. Say whom to believe: --trust NODE_ID"


def _who(witnesses: Sequence[Witness], claim: Claim) -> str:
    behind = sorted((w for w in witnesses if claim in w.claims), key=lambda w: (not w.is_named, w.node_id))
    names = [short(w.node_id) + " (at a join address)" * w.is_named for w in behind[:NAMED_TOLD_MAX]]
    more = f" and {len(behind) - NAMED_TOLD_MAX} more" if len(behind) > NAMED_TOLD_MAX else ""
    return ", ".join(names) + more
