"""When to snapshot, which rounds to close, and from which snapshot to start: the state machine of `claims`.

It sees the node's own claims and those of the live members, and asks its adapter for work: `Seal`, `Close`,
`Prefetch`, `Adopt`. A node that has not joined yet has no claims; its first claim is the snapshot that it
adopts. `joining` chooses that snapshot; `joining` and `forks` decide when to give up our history for another
one. One snapshot is fetched at a time, from every member that claims it.
"""

from collections import deque
from collections.abc import Sequence

from gossamer.protocol import limits
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Adopt, Notice, Prefetch, Seal
from gossamer.protocol.events import Need
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Author, Holdings
from gossamer.protocol.history.claims import (
    PeerClaim,
    PeerClaims,
    agreed,
    closable_round,
    roundest,
    sealed_round,
)
from gossamer.protocol.history.forks import Forks
from gossamer.protocol.history.joining import Joining, TimeAway
from gossamer.protocol.records import Claim, Claims

LOOK_INTERVAL_S = 2.5
"""Claims are compared at every second housekeeping of a node (see `replica`)."""

LOOKS_PER_DELAY = 8
"""Of 1,024 members, each of whom says something new every 72 s, the claims are compared every 11 s."""

HURRIED_LOOK_S = 0.1
"""A node that has no snapshot to start from looks more often, as does one that has just come back."""

CLAIMED_MAX = 32
"""Own claims that are remembered. Where rounds are fast, members' newest snapshots are seldom of the same
round at the same time."""

GONE_AFTER_S = 10.0
"""A snapshot that nobody has claimed for this long is not worth waiting for."""


class Sealing:
    """Decides about the sealed past of one node."""

    def __init__(
        self, context: Context, peers: PeerClaims, fetcher: Fetcher, holdings: Holdings, author: Author
    ) -> None:
        self._context = context
        self._outbox = context.outbox
        self._section = context.manifest.history
        self._peers = peers
        self._fetcher = fetcher
        self._holdings = holdings
        self._is_first = not context.info.bootstrap
        """Whether there is nobody to join, so that history begins here, with genesis."""
        self._joining = Joining(context)
        self._away = TimeAway(context)
        self._forks = Forks(author)
        self.claims: Claims = ()
        """The snapshots that we hold, newest first; empty until we have joined."""
        self._claimed: dict[int, Claim] = {}
        """What we claimed lately, by round, and still stand by: others may not have got further yet."""
        self.adopting: Claim | None = None
        """The snapshot that we start from as soon as it is here."""
        self.sought: Claim | None = None
        """The snapshot that is being fetched: the one that we adopt, one that we may have to, or the one that
        we have started from, while its sums are missing."""
        self._is_whole = True
        """Whether the sums of our newest snapshot are here, too."""
        self.floor = 0
        self._asked_to_seal = 0
        self._clocks: deque[tuple[float, int]] = deque()
        self._claimed_at = 0.0
        self._next_look = 0.0

    @property
    def joined(self) -> bool:
        return bool(self.claims)

    @property
    def whole_claims(self) -> Claims:
        """What others may fetch from us, and count on: claims of snapshots that are here with their sums."""
        return self.claims if self._is_whole else ()

    @property
    def knows_where_it_is(self) -> bool:
        """Whether our history is that of the swarm, as far as we know: else we publish nothing."""
        return not self._away.starts_over and self._away.outlived_since is None

    @property
    def is_in_a_hurry(self) -> bool:
        """Whether to look at `deadline`, without waiting for the next housekeeping."""
        return self._away.looks_until > 0.0 or not (self.joined or self.adopting)

    def restore(self, claims: Claims, floor: int, extent: int = 0, is_whole: bool = True) -> None:
        """Take over what a previous run held, which knew of rounds up to `extent`."""
        self.claims, self._is_whole = claims, is_whole
        if not is_whole:
            self._seek(None)
        self._claimed = {claim.round: claim for claim in claims[:1]}
        self.floor = floor
        self.came_back(extent)

    def came_back(self, extent: int) -> None:
        """We were away, stopped or asleep, and know of rounds up to `extent`."""
        known = max(extent, self.floor, *(claim.round for claim in self.claims))
        self._away.came_back(known, has_history=self.joined)

    def sealed(self, claims: Claims) -> None:
        """Our snapshots have changed."""
        if self._away.starts_over:
            return  # that snapshot was still being written, and is of the history that we gave up
        if self.claims and claims[0].round <= self.claims[0].round:
            # A late record: of our earlier claims, only those of closed rounds are sure to hold still.
            self._claimed = {r: claim for r, claim in self._claimed.items() if r <= self.floor}
        self.claims, self._is_whole = claims, True
        if self.sought in claims:
            self.sought = None
        self._claimed |= {claim.round: claim for claim in claims[:1]}
        for round_ in sorted(self._claimed)[:-CLAIMED_MAX]:
            del self._claimed[round_]

    def adopted(self, claim: Claim) -> None:
        """Phi is now that snapshot: our history begins there. `sealed` follows once its sums are here."""
        self.claims, self._is_whole = (claim,), False
        self._away.settle(starts_over=False)
        self._forks.begin_anew()
        self._claimed = {claim.round: claim}
        self.floor = claim.round
        self.adopting, self.sought = None, claim
        self._asked_to_seal = claim.round
        self._clocks.clear()  # these readings may belong to the history before

    def unusable(self, claim: Claim) -> None:
        """A claimed snapshot is none of this model: our own history goes on, or another one is chosen."""
        self._peers.unusable(claim.root)
        if self.sought is not None and self.sought.root == claim.root:
            self._seek(None)
            self._forks.begin_anew()

    def _seek(self, claim: Claim | None) -> None:
        """Fetch this snapshot from now on, or the rest of our own, and no other one."""
        if claim is None and not self._is_whole:
            claim = next(iter(self.claims), None)
        if self.sought is not None and (claim is None or claim.root != self.sought.root):
            self._fetcher.wants.forget(self.sought.key)
        self.adopting, self.sought = None, claim
        if claim is not None:
            self._fetcher.fetch_between(claim.key, self._is_covered)

    def stretch(self, factor: int) -> None:
        """Rounds are so many times shorter than usual: spans of rounds are to last as long."""
        self._section = self._context.manifest.history.stretched(factor)

    def deadline(self) -> float:
        return self._next_look

    def wake(self, now: float, clock: int) -> None:
        """Look at what the others claim, if that is due. `clock`: the swarm's round."""
        if now < self._next_look:
            return
        more = self._peers.delay_s / LOOKS_PER_DELAY
        is_hurried = self.is_in_a_hurry
        self._next_look = now + (HURRIED_LOOK_S + more / 16 if is_hurried else LOOK_INTERVAL_S + more)
        members = self._peers.members()
        if self.adopting is not None:
            if self._is_to_be_given_up(self.adopting, members, now):
                self._seek(None)
        elif not self.joined:
            self._join(members, now)
        elif self._away.is_outlived(clock, members, now):
            text = f"we were away since round {self._away.extent}, and the swarm has closed rounds since"
            self._start_over(text, members, now)
        elif not self._is_whole and self._has_lost_sums(members, now):
            self._start_over("nobody has the rest of the snapshot that we started from", members, now)
        elif self.knows_where_it_is:
            settled = self._settled(clock, now)
            defeat = self._forks.verdict(self._claimed, self.floor, self._peers, now)
            self._seal(settled)
            self._close(settled, [member.claims for member in members])
            if defeat is not None:
                winner, text = defeat
                self._outbox.append(Notice(text))
                self._adopt(winner, now)

    # -- where our history begins

    def _join(self, members: Sequence[PeerClaim], now: float) -> None:
        if self._away.starts_over:
            members = self._away.who_went_on(members)
        best = self._peers.genesis if self._is_first else self._joining.choose(members, now)
        if best is not None:
            self._adopt(best, now)
        elif (early := self._joining.prefetch(members)) is not None:
            self._seek(early)
            self._outbox.append(Prefetch(early))

    def _start_over(self, why: str, members: Sequence[PeerClaim], now: float) -> None:
        self._outbox.append(Notice(f"{why}: starting again from the swarm's snapshot"))
        self._away.settle(starts_over=True)
        self.claims, self._is_first = (), False
        self._claimed.clear()
        self._joining = Joining(self._context)
        self._join(members, now)

    def _adopt(self, claim: Claim, now: float) -> None:
        self._seek(claim)
        self.adopting = claim
        self._claimed_at = now
        self._outbox.append(Adopt(claim))

    def _is_to_be_given_up(self, claim: Claim, members: Sequence[PeerClaim], now: float) -> bool:
        """Whether nobody claims the snapshot that we fetch any more, or no chunk of it has come for too long,
        and there is a better one: a liar can claim for ever a snapshot that it does not serve."""
        if self._is_first or any(claim in member.claims for member in members):
            self._claimed_at = now
        if now - self._claimed_at > GONE_AFTER_S:
            return True
        peers = [member for member in members if member.claims]
        return self._fetcher.is_stalled(claim.key, now) and self._joining.best(peers) not in (claim, None)

    def _has_lost_sums(self, members: Sequence[PeerClaim], now: float) -> bool:
        """Whether the rest of the snapshot that we started from cannot be had any more, and another can."""
        claim = self.claims[0]
        is_gone = self.sought == claim and self._is_to_be_given_up(claim, members, now)
        return is_gone and any(member.claims for member in members)

    # -- the snapshot that is being fetched

    def _is_covered(self, record_id: bytes) -> bool:
        """Whether the snapshot holds a delta's round, so that its payload will not be needed."""
        delta = self._context.ledger.get(record_id)
        return delta is not None and self.sought is not None and delta.round <= self.sought.round

    def need(self, event: Need, now: float) -> None:
        """Fetch chunks; those of the snapshot come from every member that claims it."""
        self._holdings.need(event.key, event.chunks, now)
        for link in self._context.links.all():
            self.hint(link.number)

    def hint(self, number: int) -> None:
        """A link's peer has stated its claims: if the snapshot fetched is one, the peer holds all of it."""
        if self.sought is None or self.sought.key not in self._fetcher.wants:
            return
        link = self._context.links.get(number)
        member = self._context.roster.get(link.node_id) if link is not None else None
        if member is not None and self.sought.root in (c.root for c in member.record.body.claims):
            self._fetcher.hint(number, self.sought.key)

    # -- where it ends

    def _settled(self, clock: int, now: float) -> int:
        """The round that the clock showed some seconds ago, or shows now if that is lower.

        While we are alone, the clock reads our own last round, which may lie far beyond what the others have
        reached: for instance in the first moment after a start, if we had gone back to where they are.
        """
        self._clocks.append((now, clock))
        settled = 0
        while self._clocks and self._clocks[0][0] <= now - limits.SEAL_SETTLE_S:
            settled = self._clocks.popleft()[1]
        return min(settled, clock)

    def _seal(self, settled: int) -> None:
        """Ask for a snapshot if one is due by `settled`, see `_settled`."""
        last = max(self._asked_to_seal, self.claims[0].round)
        target = roundest(last, sealed_round(settled, self._section), self._section.snapshot_every)
        if target is not None:
            self._asked_to_seal = target
            self._outbox.append(Seal(target))

    def _close(self, settled: int, others: Sequence[Claims]) -> None:
        # A cheap check that mostly ends it: no agreed claim of ours is newer than our newest one.
        if closable_round(self.claims[0].round, settled, self._section) <= self.floor:
            return
        everyone = [self.claims, *(claims for claims in others if claims)]
        ours = (claim for claims in everyone for claim in claims if self._claimed.get(claim.round) == claim)
        newest = agreed(ours, len(everyone))
        if newest is None:
            return
        floor = closable_round(newest.round, settled, self._section)
        if floor > self.floor:
            self.floor = floor
            self._holdings.close(floor)
