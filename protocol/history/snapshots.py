"""The state machine of `claims`: when to seal, which rounds to close, and from which snapshot to start.

It sees the node's own claims and those of the live members, and asks its adapter for work: `Seal`, `Close`,
`Adopt`. A node that has not joined yet has no claims; its first claim is the snapshot that it adopts.
`joining` chooses that snapshot; `joining` and `forks` decide when to give up our history for another one.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from gossamer.protocol import limits
from gossamer.protocol.claims import (
    Claim,
    Claims,
    agreed,
    closable_round,
    genesis_claim,
    roundest,
    sealed_round,
)
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Adopt, Close, Effect, Notice, Prefetch, Seal
from gossamer.protocol.events import Need
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Holdings
from gossamer.protocol.history.forks import Defeat, Forks
from gossamer.protocol.history.joining import Joining, TimeAway
from gossamer.protocol.history.peer_claims import PeerClaim, PeerClaims
from gossamer.protocol.manifest import Manifest

LOOK_INTERVAL_S = 2.5
"""A look is due at every second of the turns that a node takes (see `replica`)."""

JOINING_LOOK_S = 0.05
RETURN_LOOK_S = 0.25
"""A node that has no snapshot to start from looks more often, as does one that has just come back."""

CLAIMED_MAX = 32
"""Own claims that are remembered. Where rounds are fast, members' newest snapshots are seldom of the same
round at the same time."""

GONE_AFTER_S = 10.0
"""A snapshot that nobody has claimed for this long is not worth waiting for."""


class Sealing:
    """Decides about the sealed past of one node."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        is_first: bool,
        trusted: Collection[bytes],
        own_last: Callable[[], int],
    ) -> None:
        """`is_first`: there is nobody to join, so history begins here, with genesis. `trusted`: see
        `Joining`. `own_last`: the last round that we have
        signed, 0 if none."""
        self._section = manifest.history
        self.genesis = genesis_claim(manifest.genesis.root)
        self._is_first = is_first
        self._trusted = trusted
        self._joining = Joining(trusted)
        self._away = TimeAway(manifest.history, is_first=is_first)
        self._forks = Forks(own_last)
        self.claims: Claims = ()
        """The snapshots that we hold, newest first; empty until we have joined."""
        self._claimed: dict[int, Claim] = {}
        """What we claimed lately, by round, and still stand by: others may not have got further yet."""
        self.adopting: Claim | None = None
        self.floor = 0
        self._asked_to_seal = 0
        self._clocks: deque[tuple[float, int]] = deque()
        self._claimed_at = 0.0
        self._next_look = 0.0

    @property
    def joined(self) -> bool:
        return bool(self.claims)

    @property
    def starts_over(self) -> bool:
        """Whether we have given up our history, and the swarm's snapshot is not here yet."""
        return self._away.starts_over

    @property
    def may_be_outlived(self) -> bool:
        """Whether the members that we hear say that the swarm went on without us; not settled yet."""
        return self._away.may_be_outlived

    @property
    def is_in_a_hurry(self) -> bool:
        """Whether to look at `deadline`, without waiting for the next turn."""
        return not self.joined or self._away.looks_until > 0.0

    def restore(self, claims: Claims, floor: int, extent: int = 0) -> None:
        """Take over what a previous run held, which knew of rounds up to `extent`."""
        self.claims = claims
        self._claimed = {claim.round: claim for claim in claims[:1]}
        self.floor = floor
        self.came_back(extent)

    def came_back(self, extent: int) -> None:
        """We were away, stopped or asleep, and know of rounds up to `extent`."""
        known = max(extent, self.floor, *(claim.round for claim in self.claims))
        self._away.came_back(known, has_history=self.joined)

    def sealed(self, claims: Claims) -> None:
        """Our snapshots have changed."""
        if self.starts_over:
            return  # that snapshot was still being written, and is of the history that we gave up
        if self.claims and claims[0].round <= self.claims[0].round:
            # A late record: of our earlier claims, only those of closed rounds are sure to hold still.
            self._claimed = {r: claim for r, claim in self._claimed.items() if r <= self.floor}
        self.claims = claims
        self._claimed |= {claim.round: claim for claim in claims[:1]}
        for round_ in sorted(self._claimed)[:-CLAIMED_MAX]:
            del self._claimed[round_]

    def adopted(self, claim: Claim) -> None:
        """Phi is now that snapshot: our history begins there."""
        self.claims = (claim,)
        self._away.over()
        self._forks.adopted()
        self._claimed = {claim.round: claim}
        self.floor = claim.round
        self.adopting = None
        self._asked_to_seal = claim.round
        self._clocks.clear()  # these readings may belong to the history before

    def unusable(self, claim: Claim) -> None:
        """Nobody can adopt that snapshot: our own history goes on, or another snapshot is chosen."""
        if self.adopting is not None and self.adopting.root == claim.root:
            self.adopting = None
            self._forks.unusable()

    def deadline(self) -> float:
        return self._next_look

    def wake(self, now: float, clock: int, others: PeerClaims, *, is_stalled: bool = False) -> list[Effect]:
        """Look at what the others claim, if that is due.

        `clock`: the swarm's round. `is_stalled`: no chunk of the snapshot to adopt has come for too long.
        """
        if now < self._next_look:
            return []
        self._next_look = now + self._look_interval(now)
        members = others.members()
        claims = [member.claims for member in members]
        if self.adopting is not None:
            if self._is_gone(self.adopting, claims, now) or (
                is_stalled and self._joining.prefers_another(self.adopting, members)
            ):  # one liar can claim for ever a snapshot that it does not serve
                self.adopting = None
            return []
        if not self.joined:
            return self._join(members, now)
        if self._away.is_outlived(clock, members, now):
            return self._start_over(members, now)
        if self.may_be_outlived:
            return []
        defeat = self._forks.left_behind(self.floor, others, now)
        if defeat is not None:
            return self._yield(defeat, now)
        settled = self._settled(clock, now)
        result = [*self._seal(settled), *self._close(settled, claims)]
        defeat = self._forks.outweighed(self.claims[0], self._claimed, others, now)
        return result if defeat is None else [*result, *self._yield(defeat, now)]

    def _look_interval(self, now: float) -> float:
        if not self.joined and self.adopting is None:
            return JOINING_LOOK_S
        return RETURN_LOOK_S if now < self._away.looks_until else LOOK_INTERVAL_S

    # -- where our history begins

    def _join(self, members: Sequence[PeerClaim], now: float) -> list[Effect]:
        if self._is_first:
            return self._adopt(self.genesis, now)
        if self.starts_over:
            members = self._away.who_went_on(members)
        best, said = self._joining.choose(members, now)
        return said if best is None else self._adopt(best, now)

    def _start_over(self, members: Sequence[PeerClaim], now: float) -> list[Effect]:
        text = (
            f"we were away since round {self._away.extent}, and the swarm has closed rounds since:"
            " starting again from its snapshot"
        )
        self._away.give_up()
        self.claims, self._is_first = (), False
        self._claimed.clear()
        self._joining = Joining(self._trusted)
        return [Notice(text), *self._join(members, now)]

    def _yield(self, defeat: Defeat, now: float) -> list[Effect]:
        return [Notice(defeat.text), *self._adopt(defeat.winner, now)]

    def _adopt(self, claim: Claim, now: float) -> list[Effect]:
        self.adopting = claim
        self._claimed_at = now
        return [Adopt(claim)]

    def _is_gone(self, claim: Claim, others: Sequence[Claims], now: float) -> bool:
        if self._is_first or any(claim in claims for claims in others):
            self._claimed_at = now
        return now - self._claimed_at > GONE_AFTER_S

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

    def _seal(self, settled: int) -> list[Effect]:
        """Ask for a snapshot if one is due by `settled`, see `_settled`."""
        last = max(self._asked_to_seal, self.claims[0].round)
        target = roundest(last, sealed_round(settled, self._section), self._section.snapshot_every)
        if target is None:
            return []
        self._asked_to_seal = target
        return [Seal(target)]

    def _close(self, settled: int, others: Sequence[Claims]) -> list[Effect]:
        # A cheap check that mostly ends it: no agreed claim of ours is newer than our newest one.
        if closable_round(self.claims[0].round, settled, self._section) <= self.floor:
            return []
        everyone = [self.claims, *(claims for claims in others if claims)]
        ours = (claim for claims in everyone for claim in claims if self._claimed.get(claim.round) == claim)
        newest = agreed(ours, len(everyone))
        if newest is None:
            return []
        floor = closable_round(newest.round, settled, self._section)
        if floor <= self.floor:
            return []
        self.floor = floor
        return [Close(floor)]


# --- The snapshot that is being fetched: one at a time, from every member that claims it.
#
# `Sealing` decides which one; this module passes its decisions on to the fetcher and the holdings.


class SnapshotPull:
    """Passes the decisions of `sealing` on to the fetcher and the holdings."""

    def __init__(
        self,
        context: Context,
        sealing: Sealing,
        peer_claims: PeerClaims,
        fetcher: Fetcher,
        holdings: Holdings,
    ) -> None:
        self._outbox = context.outbox
        self._ledger = context.ledger
        self._roster = context.roster
        self._links = context.links
        self._sealing = sealing
        self._peer_claims = peer_claims
        self._fetcher = fetcher
        self._holdings = holdings
        self._sought: Claim | None = None
        """The snapshot being fetched, or the last one that was."""

    def wake(self, now: float, clock: int) -> None:
        """Have `Sealing` look at what members claim. `clock`: the swarm's round."""
        adopting, wants = self._sealing.adopting, self._fetcher.wants
        is_stalled = adopting is not None and self._fetcher.is_stalled(adopting.key, now)
        result = self._sealing.wake(now, clock, self._peer_claims, is_stalled=is_stalled)
        if adopting is not None and self._sealing.adopting is None:
            wants.forget(adopting.key)
        for effect in result:
            if isinstance(effect, Prefetch | Adopt):
                self.seek(effect.claim)
        for effect in result:
            if isinstance(effect, Close):
                self._holdings.close(effect.round)
            else:
                self._outbox.append(effect)

    def seek(self, claim: Claim) -> None:
        """Fetch this snapshot from now on, and no other one."""
        if self._sought is not None and self._sought.root != claim.root:
            self._fetcher.wants.forget(self._sought.key)
        self._sought = claim
        self._fetcher.fetch_between(claim.key, self._is_in_what_is_sought)

    def _is_in_what_is_sought(self, record_id: bytes) -> bool:
        """Whether the snapshot sought covers a delta's round, so that its payload will not be needed."""
        delta = self._ledger.get(record_id)
        return delta is not None and self._sought is not None and delta.round <= self._sought.round

    def unusable(self, claim: Claim) -> None:
        """A claimed snapshot is none of this model: it is not chosen again."""
        self._peer_claims.unusable(claim.root)
        self._fetcher.wants.forget(claim.key)
        self._sealing.unusable(claim)

    def need(self, event: Need, now: float) -> None:
        """Fetch chunks; those of the snapshot come from every member that claims it."""
        self._holdings.need(event.key, event.chunks, now)
        for link in self._links.all():
            self.hint(link.number)

    def hint(self, number: int) -> None:
        """A link's peer has stated its claims: if the snapshot sought is one, the peer holds all of it."""
        if self._sought is None or self._sought.key not in self._fetcher.wants:
            return
        link = self._links.get(number)
        member = self._roster.get(link.node_id) if link is not None else None
        if member is not None and self._sought.root in (c.root for c in member.record.body.claims):
            self._fetcher.hint(number, self._sought.key)
