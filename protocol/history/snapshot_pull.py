"""The snapshot that is being fetched: one at a time, from every member that claims it.

`Sealing` decides which one; this module passes its decisions on to the fetcher and the holdings.
"""

from gossamer.protocol.claims import Claim
from gossamer.protocol.effects import Adopt, Close, Effect, Prefetch
from gossamer.protocol.events import Need
from gossamer.protocol.fetching.fetch import Fetcher
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.history.sealing import Sealing
from gossamer.protocol.history.witnesses import Witnesses
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.roster import Roster


class SnapshotPull:
    """Passes the decisions of `sealing` on to the fetcher and the holdings."""

    def __init__(
        self,
        sealing: Sealing,
        witnesses: Witnesses,
        ledger: Ledger,
        roster: Roster,
        links: Links,
        fetcher: Fetcher,
        holdings: Holdings,
    ) -> None:
        self._sealing = sealing
        self._witnesses = witnesses
        self._ledger = ledger
        self._roster = roster
        self._links = links
        self._fetcher = fetcher
        self._holdings = holdings
        self._sought: Claim | None = None
        """The snapshot being fetched, or the last one that was."""

    def wake(self, now: float, clock: int) -> list[Effect]:
        """Have `Sealing` look at what members claim. `clock`: the swarm's round."""
        adopting, wants = self._sealing.adopting, self._fetcher.wants
        if self._sealing.joined:  # a joiner looks many times a second, and has no history to give up
            self._witnesses.look(now)
        is_stalled = adopting is not None and self._fetcher.is_stalled(adopting.key, now)
        result = self._sealing.wake(now, clock, self._witnesses, is_stalled=is_stalled)
        if adopting is not None and self._sealing.adopting is None:
            wants.forget(adopting.key)
        for effect in result:
            if isinstance(effect, Prefetch | Adopt):
                self.seek(effect.claim)
        return [self._holdings.close(e.round) if isinstance(e, Close) else e for e in result]

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
        self._witnesses.unusable(claim.root)
        self._fetcher.wants.forget(claim.key)
        self._sealing.unusable(claim)

    def need(self, event: Need, now: float) -> list[Effect]:
        """Fetch chunks; those of the snapshot come from every member that claims it."""
        result = self._holdings.need(event.key, event.chunks, now)
        for link in self._links.all():
            self.hint(link.number)
        return result

    def hint(self, number: int) -> None:
        """A link's peer has stated its claims: if the snapshot sought is one, the peer holds all of it."""
        if self._sought is None or self._sought.key not in self._fetcher.wants:
            return
        link = self._links.get(number)
        member = self._roster.get(link.node_id) if link is not None else None
        if member is not None and self._sought.root in (c.root for c in member.row.body.claims):
            self._fetcher.hint(number, self._sought.key)
