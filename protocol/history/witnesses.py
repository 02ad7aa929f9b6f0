"""What members attest about the past, read off the roster, the ledger and the payloads that are here."""

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim, Claims
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.history.company import Company
from gossamer.protocol.history.testimony import Witness
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.roster import Roster
from gossamer.protocol.records import Row


class Witnesses:
    """The members' `Testimony`."""

    def __init__(
        self, genesis: Claim, ledger: Ledger, roster: Roster, links: Links, holdings: Holdings
    ) -> None:
        """`genesis`: the only valid claim for round 0, which the manifest states."""
        self._genesis = genesis
        self._ledger = ledger
        self._roster = roster
        self._links = links
        self._holdings = holdings
        self._company = Company(roster, ledger)
        self._unusable: dict[bytes, None] = {}
        """Roots of unusable snapshots, oldest first: claims of them do not count."""

    def unusable(self, root: bytes) -> None:
        """A claimed snapshot turned out to be none of this model: no claim of it counts any more."""
        self._unusable[root] = None
        if len(self._unusable) > limits.UNUSABLE_MAX:
            del self._unusable[next(iter(self._unusable))]

    def witnesses(self) -> list[Witness]:
        given_ids, authors = self._links.given_ids(), self._ledger.last_rounds
        return [
            Witness(
                self._claims_of(row),
                row.node_id,
                row.node_id in given_ids,
                member.told_at,
                row.body.round if row.node_id in authors else 0,
                row.body.trains,
            )
            for member in self._roster.live()
            for row in (member.row,)
        ]

    def contributors(self) -> list[Claims]:
        """The claims of each author of a delta whose payload is here.

        This includes members that are absent just now: they have not spoken against us, and may have spoken
        for us.
        """
        authors = {delta.author for delta in self._ledger if self._holdings.holds(delta.record_id)}
        rows = [member.row for member in self._roster.members()]
        return [self._claims_of(row) for row in rows if row.node_id in authors]

    def look(self, now: float) -> None:
        """Note which members are present. Call this every few seconds."""
        self._company.look(now)

    def authors(self) -> int:
        return len(self._company)

    def share_lacking(self, round_: int, now: float) -> float:
        return self._holdings.share_lacking(round_, now)

    def _claims_of(self, row: Row) -> Claims:
        """A member's claims, without those that cannot be true."""
        genesis, unusable = self._genesis, self._unusable
        return tuple(
            [
                claim
                for claim in row.body.claims
                if claim.root not in unusable and (claim.round > 0 or claim == genesis)
            ]
        )
