"""The snapshot that is being fetched, and whose word about the past a node goes by.

`Sealing` decides which rounds are sealed and which snapshot to start from; here it is told what the live
members claim, and what it decides is carried over to what is fetched: one snapshot at a time, from all who
claim it.
"""

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim, Claims
from gossamer.protocol.effects import Adopt, Close, Effect, Prefetch
from gossamer.protocol.events import Need
from gossamer.protocol.fetching.fetch import Fetcher
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.history.joining import Witness
from gossamer.protocol.history.sealing import Sealing
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.roster import Health, Roster
from gossamer.protocol.records import Row


class Snapshots:
    """What members claim of the past, for `sealing`; and what comes of it, for `holdings` and `fetcher`."""

    def __init__(
        self,
        sealing: Sealing,
        ledger: Ledger,
        roster: Roster,
        links: Links,
        fetcher: Fetcher,
        holdings: Holdings,
    ) -> None:
        self._sealing = sealing
        self._ledger = ledger
        self._roster = roster
        self._links = links
        self._fetcher = fetcher
        self._holdings = holdings
        self._sought: Claim | None = None
        """The one being fetched, or the last that was."""
        self._unusable: dict[bytes, None] = {}
        """Roots of snapshots that cannot be, the oldest first: they do not count as claimed."""

    def wake(self, now: float, clock: int) -> list[Effect]:
        """Look at what members claim: that is due. `clock`: the swarm's round."""
        adopting = self._sealing.adopting
        result = self._sealing.wake(
            now,
            clock,
            self._witnesses(),
            lambda round_: self._holdings.share_lacking(round_, now),
            self._claims_of_contributors,
            lambda claim: self._fetcher.wants.is_stalled(claim.key, now),
            self._authors,
        )
        if adopting is not None and self._sealing.adopting is None:
            self._fetcher.wants.forget(adopting.key)
        for effect in result:
            if isinstance(effect, Prefetch | Adopt):
                self.seek(effect.claim)
        return [self._holdings.close(e.round) if isinstance(e, Close) else e for e in result]

    def seek(self, claim: Claim) -> None:
        """What is needed from now on is of this snapshot: another one is not fetched any more."""
        if self._sought is not None and self._sought.root != claim.root:
            self._fetcher.wants.forget(self._sought.key)
        self._sought = claim
        self._fetcher.fetch_between(claim.key, self._is_in_what_is_sought)

    def _is_in_what_is_sought(self, record_id: bytes) -> bool:
        """Whether a delta is merged in the snapshot that is fetched: its payload will not be needed."""
        delta = self._ledger.get(record_id)
        return delta is not None and self._sought is not None and delta.round <= self._sought.round

    def unusable(self, claim: Claim) -> None:
        """What somebody claims is no snapshot of this model: it is not chosen again."""
        self._unusable[claim.root] = None
        if len(self._unusable) > limits.UNUSABLE_MAX:
            del self._unusable[next(iter(self._unusable))]
        self._fetcher.wants.forget(claim.key)
        self._sealing.unusable(claim)

    def need(self, event: Need, now: float) -> list[Effect]:
        """Fetch chunks, those of the snapshot from everybody who claims it."""
        result = self._holdings.need(event.key, event.chunks, now)
        for link in self._links.all():
            self.hint(link.number)
        return result

    def hint(self, number: int) -> None:
        """A link's peer has told its claims: if the snapshot that we fetch is one, it has all of it."""
        if self._sought is None or self._sought.key not in self._fetcher.wants:
            return
        link = self._links.get(number)
        member = self._roster.get(link.node_id) if link is not None else None
        if member is not None and self._sought.root in (c.root for c in member.row.body.claims):
            self._fetcher.hint(number, self._sought.key)

    def _witnesses(self) -> list[Witness]:
        told_of, authors = self._links.told_of(), self._ledger.last_rounds
        return [
            Witness(
                self._claims_of(row),
                row.node_id,
                row.node_id in told_of,
                member.told,
                row.body.round if row.node_id in authors else 0,
            )
            for member in self._roster.live()
            for row in (member.row,)
        ]

    def _authors(self) -> int:
        """How many members that have not left are known to have published, in rounds long closed too."""
        members = (member for member in self._roster.members() if member.health is not Health.LEFT)
        return sum(self._ledger.last_round(member.row.node_id) > 0 for member in members)

    def _claims_of_contributors(self) -> list[Claims]:
        """What the authors of deltas that are here claim.

        Also those that are not there just now: they have not spoken against us, and may have for us.
        """
        authors = {delta.author for delta in self._ledger if self._holdings.holds(delta.record_id)}
        rows = [member.row for member in self._roster.members()]
        return [self._claims_of(row) for row in rows if row.node_id in authors]

    def _claims_of(self, row: Row) -> Claims:
        """What a member claims, as far as that can be; of round 0 the manifest tells, and nobody else."""
        genesis, unusable = self._sealing.genesis, self._unusable
        return tuple(
            [
                claim
                for claim in row.body.claims
                if claim.root not in unusable and (claim.round > 0 or claim == genesis)
            ]
        )
