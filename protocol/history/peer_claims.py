"""Which members take part: those that publish, less those that went while most of the others stayed.

A majority of members decides, and absent members count towards the total: our own line may be down, or
somebody in between may keep them away. But members that come once and die without a word, or laptops that
sleep, are remembered for a day. In a swarm of some weeks they would always be the majority.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, Protocol

from gossamer.protocol.claims import Claim, Claims
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Health, Member, Roster

# --- What the other members say about the past, as far as `Sealing` needs to know it.


class Witness(NamedTuple):
    """A live member's word about the past."""

    claims: tuple[Claim, ...]
    node_id: bytes = b""
    is_named: bool = False
    """Whether it answers at one of the join addresses that we were given."""
    told_at: float = inf
    """When its newest row came, by the local clock, seconds."""
    round: int = 0
    """The last round that it has published; 0 if none since it came (back), or if we know no delta of its."""
    trains: bool = True


class Testimony(Protocol):
    """Answers what `Sealing` asks during one look. Each answer is computed only when asked for."""

    def witnesses(self) -> Sequence[Witness]:
        """The live members."""

    def contributors(self) -> Sequence[Claims]:
        """The claims of each author of a delta whose payload is here, live or not."""

    def authors(self) -> int:
        """How many members take part, present or not: see `company`."""

    def share_lacking(self, round_: int, now: float) -> float:
        """The share, 0 to 1, of authors with payloads up to a round that another node holds and we lack."""


STAYED_S = 3600.0
"""A member that has been gone for this long, while most others were present, takes part no more. After a
network split heals, members are back within a minute."""


class Company:
    """Counts the members that take part, without us and without those that have announced that they leave."""

    def __init__(self, roster: Roster, ledger: Ledger) -> None:
        self._roster = roster
        self._ledger = ledger
        self._given_up: set[bytes] = set()
        """Members that went and did not come back."""
        self._most_since: float | None = None
        """Since when most of the members that take part have been present; None while they are not."""

    def look(self, now: float) -> None:
        """Note which members are present. Call this every few seconds."""
        authors = list(self._authors())
        gone = {member.record.node_id: member.since for member in authors if member.is_gone}
        self._given_up &= gone.keys()
        there, taking_part = len(authors) - len(gone), len(authors) - len(self._given_up)
        if 2 * there <= taking_part:
            self._most_since = None
            return
        if self._most_since is None:
            self._most_since = now
        since = self._most_since
        self._given_up.update(node_id for node_id, went in gone.items() if now - max(went, since) >= STAYED_S)

    def __len__(self) -> int:
        return sum(member.record.node_id not in self._given_up for member in self._authors())

    def _authors(self) -> Iterator[Member]:
        """Members that have not left and are known to have published, even if only in rounds long closed."""
        for member in self._roster.members():
            if member.health is not Health.LEFT and self._ledger.last_round(member.record.node_id) > 0:
                yield member
