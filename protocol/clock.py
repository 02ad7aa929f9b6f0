"""The swarm's round clock as one node reads it, and which rounds it takes for possible by now."""

from gossamer.protocol.admission import Charter, Role
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import is_plausible, round_clock
from gossamer.protocol.roster import Roster


class SwarmClock:
    """Reads the round clock off the rows and deltas of the live members."""

    def __init__(
        self,
        manifest: Manifest,
        charter: Charter,
        roster: Roster,
        ledger: Ledger,
        *,
        trains: bool,
        unix_offset_s: float,
    ) -> None:
        """`trains`: whether we count as a member of the clock. `unix_offset_s` is Unix time less `now`."""
        self._manifest = manifest
        self._charter = charter
        self._roster = roster
        self._ledger = ledger
        self._trains = trains
        self._unix_offset_s = unix_offset_s

    def allows(self, round_: int, now: float) -> bool:
        """Whether the swarm is old enough for this round."""
        return is_plausible(round_, self._manifest, now + self._unix_offset_s)

    def read(self, own_last: int, now: float) -> int:
        """The round that the swarm is at. Who has never published has no say in it yet, but counts.

        A claim of the far future is nobody's: to follow it would be to sign what all others refuse.
        """
        rounds = self._rounds_of_others()
        said = [round_ for round_ in (*rounds, own_last) if round_ > 0]
        if said and not self.allows(max(said), now):
            said = [round_ for round_ in said if self.allows(round_, now)]
        return round_clock(said, members=len(rounds) + self._trains)

    def _rounds_of_others(self) -> list[int]:
        """The latest round of every live member that trains, 0 for one that has not published."""
        return [
            max(peer.body.round, self._ledger.last_round(peer.node_id))
            for peer in [member.peer for member in self._roster.live()]
            if peer.body.trains and self._charter.role_of(peer.node_id) is Role.TRAIN
        ]
