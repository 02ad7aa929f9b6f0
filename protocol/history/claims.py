"""Sealing, agreeing and forgetting: what becomes of old rounds.

A round is *sealed* once it lies `seal_after` rounds behind the clock. Every `snapshot_every` rounds a node
writes Phi of the sealed prefix. These bytes are the same wherever the same records were merged. The node then
*claims* the snapshot in its signed record: round, root of the snapshot, digest of the records merged up to
it, and their tokens. A claim that enough members make alike is *agreed*: joiners start from it. Rounds that
lie `retain` rounds behind the clock and under an agreed snapshot are *closed*: their records and payloads are
dropped, and nothing can change them.

A record of a sealed round that is not closed yet is still merged, however late it comes: the snapshot is then
written again. Sealing is a matter of effort, closing a matter of history.

If two claims for one round stay different once the ledgers agree, the difference lies in what one side has
closed: a partition outlasted `retain`, or a node joined from a snapshot that a late record has since changed.
Then the claim that most members make wins, or else the one with more tokens (digest breaks ties), and the
other side starts again from the winner's snapshot. Tokens are a claim like any other, so against a majority
of members they count for nothing. A claim stands for all that came before it, so where two nodes share one
they share the rounds before.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.context import Context
from gossamer.protocol.gossip.announce import Holdings
from gossamer.protocol.manifest import HistorySection
from gossamer.protocol.membership.members import Health
from gossamer.protocol.records import Claim, Claims, MemberRecord


def sealed_round(clock: int, section: HistorySection) -> int:
    """The newest round at which a snapshot is due when the clock stands at `clock`."""
    return max(0, clock - section.seal_after) // section.snapshot_every * section.snapshot_every


def roundest(last: int, newest: int, every: int) -> int | None:
    """The round of the snapshot to take after that of `last`, up to `newest`; None if there is none.

    Of several multiples of `every`, this is the one that the highest power of two divides. So members that
    look at different moments, and pass some over where rounds are fast, still take the same ones.
    """
    low, high = last // every + 1, newest // every
    if high < low:
        return None
    while high & (high - 1) >= low:
        high &= high - 1  # without its lowest bit
    return high * every


def quorum(members: int) -> int:
    """How many of `members` must say a thing: more than half, or three if that is fewer."""
    return min(limits.QUORUM_MAX, members // 2 + 1)


def agreed(claims: Iterable[Claim], members: int) -> Claim | None:
    """The newest claim that a `quorum` of the members make; None if there is none."""
    counts = Counter(claims)
    return max((claim for claim, count in counts.items() if count >= quorum(members)), default=None)


def winning_claim(own: Claim, others: Iterable[Claims]) -> Claim | None:
    """The claim for our round that should win against ours, None if ours may stay. `others`: by member.

    The voters are the members that claim anything for our round, and ourselves. The claim that most of them
    make wins. Where no claim has a majority, the greatest one wins among those with `QUORUM_MAX` votes, or,
    where even the most common claim has fewer, among those with as many votes as it: as in two halves of a
    small swarm. So of three histories, a shared one wins over a longer one that one member has to itself.

    Members that claim other rounds only do not vote, but may well claim what we do: the winner needs as many
    votes as ours would have with all of theirs. Otherwise a few liars would win about a round that nobody
    else has come to yet, or that nobody else claims any more.
    """
    of_members = [claims for claims in others if claims]
    of_round = [[claim for claim in claims if claim.round == own.round] for claims in of_members]
    ballots = [[own], *(claims for claims in of_round if claims)]
    votes = Counter(claim for claims in ballots for claim in claims)
    if 2 * votes[own] > len(ballots):
        return None
    by_most = [claim for claim, count in votes.items() if 2 * count > len(ballots)]
    needed = min(limits.QUORUM_MAX, max(votes.values()))
    winner = max(by_most) if by_most else max(claim for claim, count in votes.items() if count >= needed)
    if winner == own:
        return None
    silent = len(of_members) - (len(ballots) - 1)
    return winner if votes[winner] >= votes[own] + silent else None


def chain(before: bytes, round_: int, digest: bytes) -> bytes:
    """Extend a prefix's digest by a round's digest of merged records. Rounds without any are left out."""
    return sha256(before + round_.to_bytes(4, "big") + digest).digest()


def round_digest(record_ids: Iterable[bytes]) -> bytes:
    """Digest of the set of records merged in a round."""
    return sha256(b"".join(sorted(record_ids))).digest()


def total(tokens: Iterable[int]) -> int:
    """The sum of tokens as claims state it, cut off at the largest number that a claim can hold.

    So a sum taken in parts, of closed rounds and of open ones, comes to the same.
    """
    return min(limits.TOKENS_TOTAL_MAX, sum(tokens))


def genesis_claim(root: bytes) -> Claim:
    """The claim that every node makes at first: round 0 is Phi_0."""
    return Claim(0, 0, bytes(32), root)


def closable_round(agreed_round: int, clock: int, section: HistorySection) -> int:
    """The newest round that may be closed: under an agreed snapshot, and `retain` rounds old."""
    if not section.retain:
        return 0
    old = max(0, clock - section.retain) // section.snapshot_every * section.snapshot_every
    return min(agreed_round, old)


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

    @property
    def delay_s(self) -> float:
        """By how much later than in a small swarm members say something new, see `Roster.delay_s`."""
        return self._roster.delay_s

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

    def lacks_payloads(self, round_: int, now: float) -> bool:
        """Whether another node holds a payload of a round up to this one, and we lack it."""
        return self._holdings.lacks_payloads(round_, now)

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
