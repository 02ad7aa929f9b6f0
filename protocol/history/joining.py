"""Which snapshot a joiner starts from, where members may lie about the past.

Nothing in a snapshot proves itself, and where keys are free a count of node ids proves little. The one thing
that a joiner knows by itself is which nodes it was told of: those at its join addresses. So these come first,
unless they are alone with what they say. What others say against them is believed only if the user says so.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Notice
from gossamer.protocol.fetching.requests import Wants
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.history.claims import PeerClaim, closable_round, quorum
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.identity import short
from gossamer.protocol.limits import QUORUM_MAX
from gossamer.protocol.membership.members import listed
from gossamer.protocol.records import Claim

REMIND_S = 15.0
PREFETCHES_MAX = 3
"""Snapshots that a joiner begins to fetch before it believes in one: a liar that changes its claim all the
time cannot make it fetch for ever."""


class Joining:
    """Listens to members' claims until there is one to start from."""

    def __init__(self, context: Context) -> None:
        self._outbox = context.outbox
        self._trusted = frozenset(context.info.trusted)
        """The node ids that the user has named, if any: then only their claims count."""
        self._heard_since = inf
        self._reminded_at = -inf
        self._prefetched: set[Claim] = set()

    def choose(self, members: Sequence[PeerClaim], now: float) -> Claim | None:
        """The claim to start from, None as long as there is none."""
        peers = [member for member in members if member.claims]
        if not peers:
            return None
        self._heard_since = min(self._heard_since, now)
        waited = now - self._heard_since
        # The manifest proves Phi_0. So while nobody claims more, there is nobody to listen to for longer.
        if waited < limits.ROSTER_PATIENCE_S and any(peer.claims[0].round for peer in peers):
            return None
        best = self.best(peers, patient=waited < limits.NAMED_PATIENCE_S)
        if best is None and now - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            text = f"waiting for {len(peers)} members to agree on a snapshot to start from{_dispute(peers)}"
            if self._trusted:
                text = "waiting for a snapshot from a member named with --trust"
            self._outbox.append(Notice(text))
        return best

    def prefetch(self, members: Sequence[PeerClaim]) -> Claim | None:
        """What to begin to fetch while we listen, if that is news: what we would start from by now.

        It is adopted only if it is chosen in the end. If another one is, some bytes came in vain.
        """
        best = self.best([member for member in members if member.claims])
        if best is None or best in self._prefetched or len(self._prefetched) >= PREFETCHES_MAX:
            return None
        self._prefetched.add(best)
        return best

    def best(self, peers: Sequence[PeerClaim], *, patient: bool = False) -> Claim | None:
        """The claim that we would start from by now."""
        if self._trusted:
            claims = (claim for peer in peers if peer.node_id in self._trusted for claim in peer.claims)
            return max(claims, default=None)
        return believable(peers, patient=patient)


def _support(peers: Iterable[PeerClaim]) -> Counter[Claim]:
    """How many members make each claim."""
    return Counter(claim for peer in peers for claim in set(peer.claims))


def believable(peers: Sequence[PeerClaim], *, patient: bool = False) -> Claim | None:
    """The claim to start from, None if there is none.

    1. The newest claim that a named member makes and, where there are three or more peers, another one
       too: so free node ids cannot outvote a named member, and it cannot lead us astray alone. If several
       named members make such claims, the claim with more peers: a named member may lie.
    2. Where named members make no such claim, unless we are `patient` with them: the newest claim that most
       peers make, or else the one that more make than any other. It must be one that a `quorum` of all
       make, and that neither a named member nor as many others contradict.

    The order in which a named member makes its claims counts: `liars`, seed 6 of 8 nodes and 8 minutes.
    """
    support = _support(peers)
    named = {claim for peer in peers if peer.is_named for claim in peer.claims}
    needed = 1 if len(peers) < QUORUM_MAX else 2
    newest = [
        next((claim for claim in one.claims if support[claim] >= needed), None)
        for one in peers
        if one.is_named
    ]
    vouched = max(filter(None, newest), key=lambda claim: (support[claim], claim), default=None)
    if vouched is not None or (named and patient):
        return vouched
    free = [claim for claim in _unrivalled(support, named) if support[claim] >= quorum(len(peers))]
    by_most = [claim for claim in free if 2 * support[claim] > len(peers)]
    return max(by_most) if by_most else max(free, key=lambda claim: (support[claim], claim), default=None)


def _unrivalled(support: Mapping[Claim, int], named: Collection[Claim]) -> Iterator[Claim]:
    """Claims with more peers than any other for the same round, where no named member makes another."""
    by_round: dict[int, list[Claim]] = {}
    for claim in support:
        by_round.setdefault(claim.round, []).append(claim)
    for rivals in by_round.values():
        best, *next_best = nlargest(2, rivals, key=lambda claim: support[claim])
        is_alone = not next_best or support[best] > support[next_best[0]]
        if is_alone and not any(rival in named for rival in rivals if rival != best):
            yield best


def _dispute(peers: Sequence[PeerClaim]) -> str:
    """Which members contradict which about the newest round that is disputed, in words; empty if none do."""
    support = _support(peers)
    claimed = Counter(claim.round for claim in support)
    newest = max((round_ for round_, claims in claimed.items() if claims > 1), default=None)
    if newest is None:
        return ""
    sides = []
    for side in sorted((one for one in support if one.round == newest), key=lambda one: (-support[one], one))[
        :2
    ]:
        behind = sorted((not one.is_named, one.node_id) for one in peers if side in one.claims)
        sides.append(listed(short(id_) + " (at a join address)" * (not last) for last, id_ in behind))
    said = "; others: ".join(sides)
    return f". They contradict each other about round {newest}: {said}. Say whom to believe: --trust NODE_ID"


# --- When a node that has just started knows enough to train.

LOOK_INTERVAL_S = 1.0


class CatchUp:
    """Watches from the first event on how a node learns what the others have."""

    def __init__(self, context: Context, anti_entropy: AntiEntropy, wants: Wants, clock: SwarmClock) -> None:
        self._ledger = context.ledger
        self._links = context.links
        self._is_first = not context.info.bootstrap
        self._signs = context.info.trains
        self._anti_entropy = anti_entropy
        self._wants = wants
        self._clock = clock
        self._now = 0.0
        self._began = inf
        self._linked_at = -inf
        """When there was last somebody to learn from."""
        self._refuses = False
        """Whether we refuse what others publish, because by our clock it cannot exist yet."""
        self._next_look = -inf
        self._synced_at: float | None = None
        self._lacking = inf
        """The smallest number of chunks so far that were missing of what we wait for."""
        self._moved_at = inf
        """When that number was reached."""
        self._minority_since = inf
        """Since when only a minority's payloads have been missing of what we wait for."""

    def observe(self, now: float) -> None:
        """After each event, look whether a peer's ledger has been seen, and how its payloads get on."""
        self._now = now
        self._began = min(self._began, now)
        if self._links:
            self._linked_at = now
        if self._synced_at is not None and (not self._lacking or now < self._next_look):
            return
        self._next_look = now + LOOK_INTERVAL_S
        self._clock.read(now)  # a node that has just started has hardly read it
        self._refuses = self._clock.is_contradicted and now <= self._began + limits.CLOCK_PATIENCE_S
        if self._refuses:  # what was refused has to be asked for again
            self._anti_entropy.synced_once, self._synced_at = False, None
            self._lacking = self._minority_since = inf
        elif self._synced_at is None:
            self._synced_at = now if self._anti_entropy.synced_once else None
        else:
            lacking = self._wants.chunks_lacking(self._synced_at)
            if lacking < self._lacking:
                self._lacking, self._moved_at = lacking, now
            is_minority = self._lacks_few(self._synced_at)
            self._minority_since = min(self._minority_since, now) if is_minority else inf

    def is_done(self, *, has_signed: bool) -> bool:
        """Whether we may train: there is nobody to learn from, or we have a peer's ledger and its payloads.

        * Payloads of which nothing comes any more are not waited for: the peer that says it holds them may be
          a liar that withholds its own (`test_payloads_of_which_nothing_comes_are_not_waited_for`). Those of
          a minority of the authors are waited for only a while: a liar may hand its own out ever so slowly
          (`test_those_who_dribble_their_payloads_are_waited_for_only_where_they_are_most`). Whatever comes
          after all is merged late. Payloads that are published meanwhile do not count: on a slow line some of
          them are always under way.
        * A node with deltas of its own on its disk (`has_signed`) goes on once it has compared notes with a
          peer, or has found none for a while: its folder may be an old copy, and no round may be signed
          twice. One that lost its disk, and hears of its own deltas from others, must learn of all of them
          first.
        * A node that signs nothing goes on with what it has once it has had nobody to learn from for a while.
        * A node whose clock is wrong would refuse what the others publish as too early. It waits until the
          clock has been set, as happens a moment after a machine without a clock battery starts, but not for
          ever, since the others may be liars (`test_a_joiner_whose_clock_is_not_set_yet_waits_until_it_is`).
        """
        if self._refuses:
            return False
        long_alone = self._now > max(self._began, self._linked_at) + limits.RESUME_PATIENCE_S
        if not self._links and (self._is_first or (long_alone and not self._signs)):
            return True
        if has_signed:
            return self._synced_at is not None or self._now > self._began + limits.RESUME_PATIENCE_S
        if self._synced_at is None:
            return False
        stalled = self._now > self._moved_at + limits.PAYLOAD_PATIENCE_S
        dribbled = self._now > self._minority_since + limits.PAYLOAD_PATIENCE_S
        return stalled or dribbled or not self._wants.lacking(self._synced_at, self._now)

    def _lacks_few(self, by: float) -> bool:
        """Whether only payloads of at most half of the authors are missing."""
        deltas = [self._ledger.get(key) for key in self._wants.lacking(by, self._now)]
        missing = {delta.author for delta in deltas if delta is not None}
        return None not in deltas and 2 * len(missing) <= len({delta.author for delta in self._ledger})


# --- What a node missed while it was away, stopped or asleep: whether the swarm has outlived what it holds.
#
# Nobody has the rounds any more that were closed meanwhile. Without them, what came after makes another model
# than the swarm's, and the nodes that came back together could be most of the swarm. So a node that finds
# this out starts over from the snapshot of those that went on.

RETURN_S = 30.0
"""For this long a node looks whether the swarm has outlived what it holds: from when it has heard of a member
after its return, or goes on by itself. After a power cut machines may start minutes before their network.
A node that knows of nobody waits for nobody."""

ROUNDS_UNDER_WAY = 2
"""A member that is one round behind skips at most the next one; it has published for older rounds."""


def known_up_to(sealed: int, rounds: Iterable[int]) -> int:
    """The newest of `rounds`, those with records, up to which none was missed since the newest `sealed` one.

    Rounds beyond a gap were heard of after a return: a node that stops before it fills the gap keeps it. Nor
    do the last rounds count, which others may have published for after the node went
    (`test_who_stopped_before_it_had_made_good_what_it_missed_has_missed_it_still`).
    """
    newest = sealed
    for round_ in sorted(rounds):
        if round_ > newest + 1 + ROUNDS_UNDER_WAY:
            break
        newest = max(newest, round_)
    return max(sealed, newest - ROUNDS_UNDER_WAY)


class TimeAway:
    """The last time that we were away, until we know what we have missed, and that is made good.

    One rule: if somebody claims a newer snapshot than all that we knew when we went, and the swarm's clock is
    where that is closed, we start over from the snapshot of those that went on. Its clauses are named with
    the tests that need them, all in ``tests/protocol/test_joining.py``.
    """

    def __init__(self, context: Context) -> None:
        self._section = context.manifest.history
        self._is_first = not context.info.bootstrap
        self.extent = 0
        """The newest round that we knew of when we went away."""
        self.looks_until = 0.0
        """Until when we look for what we have missed: infinite before that begins, 0 once it is over."""
        self.outlived_since: float | None = None
        """Since when the members that we hear say that the swarm went on without us; not settled yet."""
        self.starts_over = False
        """Whether we have given up our history, and the swarm's snapshot is not here yet. If all that went on
        are gone by then, a restart goes on from what is on disk."""

    def came_back(self, extent: int, has_history: bool) -> None:
        """We are back, and knew of rounds up to `extent` when we went.

        If we have heard of nobody since our last return, for want of a network, that was no return.
        """
        if self.looks_until < inf and not self.starts_over:
            self.extent, self.outlived_since = extent, None
            self.looks_until = inf if has_history else 0.0

    def settle(self, *, starts_over: bool) -> None:
        """We start over, or have missed nothing (more)."""
        self.starts_over, self.looks_until, self.outlived_since = starts_over, 0.0, None

    def is_outlived(self, clock: int, members: Sequence[PeerClaim], now: float) -> bool:
        """Whether the members that we left have closed rounds, while we were away, that we never heard of.

        Who does not train moves no clock. So where all that trained are gone, or come back as we do, those at
        our join addresses tell how far the swarm went
        (`test_where_only_who_does_not_train_went_on_a_join_address_is_believed`). Nor is the first to be
        heard believed at once (`test_the_first_to_be_heard_after_a_return_is_not_believed_alone`).
        """
        if now >= self.looks_until:
            self.settle(starts_over=False)
            return False
        if members or self._is_first or clock > self.extent + ROUNDS_UNDER_WAY:
            self.looks_until = min(self.looks_until, now + RETURN_S)
        ahead, reached = self.who_went_on(members), clock
        if not any(member.round and member not in ahead for member in members):
            reached = max([clock, *(member.claims[0].round for member in ahead if member.is_named)])
        if not ahead or closable_round(reached, reached, self._section) <= self.extent:
            self.outlived_since = None
            return False
        if self.outlived_since is None:
            self.outlived_since = now
        return now - self.outlived_since >= limits.ROSTER_PATIENCE_S

    def who_went_on(self, members: Sequence[PeerClaim]) -> list[PeerClaim]:
        """The members that claim something newer than all that we knew."""
        return [member for member in members if member.claims and member.claims[0].round > self.extent]
