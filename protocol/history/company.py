"""Who takes part: the members that publish, less those who went while most of the others stayed.

What most members say counts, and who is not there counts among them: it may be our own line, or somebody in
between, that keeps it away. But members that come once and die without a word, or laptops that sleep, are
remembered for a day, and after weeks would be most of a swarm for ever.
"""

from collections.abc import Iterator

from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.membership.roster import Health, Member, Roster

STAYED_S = 3600.0
"""Who has been gone for so long, all of which most others were there, takes part no more. A network that was
split brings its members back within a minute."""


class Company:
    """Counts them. Without us, and without those that have said that they leave."""

    def __init__(self, roster: Roster, ledger: Ledger) -> None:
        self._roster = roster
        self._ledger = ledger
        self._given_up: set[bytes] = set()
        """Those who went and did not come back."""
        self._most_since: float | None = None
        """Since when most of those who take part have been there."""

    def look(self, now: float) -> None:
        """Note who is there; to be called every few seconds."""
        authors = list(self._authors())
        gone = {member.row.node_id: member.since for member in authors if member.is_gone}
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
        return sum(member.row.node_id not in self._given_up for member in self._authors())

    def _authors(self) -> Iterator[Member]:
        """Members that have not left and are known to have published, in rounds long closed too."""
        for member in self._roster.members():
            if member.health is not Health.LEFT and self._ledger.last_round(member.row.node_id) > 0:
                yield member
