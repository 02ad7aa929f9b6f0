"""What the other members say about the past: the snapshots that they claim, as far as those can be."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.claims import Claims, genesis_claim
from gossamer.protocol.context import Context
from gossamer.protocol.gossip.announce import Holdings
from gossamer.protocol.membership.members import Health
from gossamer.protocol.records import MemberRecord


class PeerClaim(NamedTuple):
    """What a live member says about the past."""

    claims: Claims
    node_id: bytes = b""
    is_named: bool = False
    """Whether it answers at one of the join addresses that we were given."""
    said_at: float = inf
    """When its newest record came, by the local clock, seconds."""
    round: int = 0
    """The last round that it has published; 0 if none since it came (back), or if we know no delta of its."""
    trains: bool = True


class PeerClaims:
    """Reads what members claim off the roster, the ledger and the payloads that are here."""

    def __init__(self, context: Context, holdings: Holdings) -> None:
        self.genesis = genesis_claim(context.manifest.genesis.root)
        """The only valid claim for round 0."""
        self._ledger = context.ledger
        self._roster = context.roster
        self._links = context.links
        self._holdings = holdings
        self._unusable: dict[bytes, None] = {}
        """Roots of unusable snapshots, oldest first: claims of them do not count."""

    def unusable(self, root: bytes) -> None:
        """A claimed snapshot turned out to be none of this model: no claim of it counts any more."""
        self._unusable[root] = None
        if len(self._unusable) > limits.UNUSABLE_MAX:
            del self._unusable[next(iter(self._unusable))]

    def members(self) -> Sequence[PeerClaim]:
        """The live members."""
        named, authors = self._links.given_ids(), self._ledger.last_rounds
        return [
            PeerClaim(
                self._claims_of(record),
                record.node_id,
                record.node_id in named,
                member.received_at,
                record.body.round if record.node_id in authors else 0,
                record.body.trains,
            )
            for member in self._roster.live()
            for record in (member.record,)
        ]

    def contributors(self) -> Sequence[Claims]:
        """The claims of each author of a delta whose payload is here.

        This includes members that are absent just now: they have not spoken against us, and may have spoken
        for us.
        """
        authors = {delta.author for delta in self._ledger if self._holdings.holds(delta.record_id)}
        records = [member.record for member in self._roster.members()]
        return [self._claims_of(record) for record in records if record.node_id in authors]

    def authors(self) -> int:
        """How many members have published, if only in rounds long closed, and have not left. Absent ones
        count: our own line may be down, or somebody in between may keep them away."""
        return sum(
            member.health is not Health.LEFT and self._ledger.last_round(member.record.node_id) > 0
            for member in self._roster.members()
        )

    def share_lacking(self, round_: int, now: float) -> float:
        """The share, 0 to 1, of authors with payloads up to a round that another node holds and we lack."""
        return self._holdings.share_lacking(round_, now)

    def _claims_of(self, record: MemberRecord) -> Claims:
        """A member's claims, without those that cannot be true."""
        genesis, unusable = self.genesis, self._unusable
        return tuple(
            [
                claim
                for claim in record.body.claims
                if claim.root not in unusable and (claim.round > 0 or claim == genesis)
            ]
        )
