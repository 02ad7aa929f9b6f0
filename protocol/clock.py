"""The swarm's round clock as one node reads it, and which rounds it takes for possible by now."""

from collections.abc import Callable

from gossamer.protocol import limits
from gossamer.protocol.admission import Charter, Role
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import is_plausible, round_clock
from gossamer.protocol.roster import Roster
from gossamer.protocol.unix_time import UnixTime


class SwarmClock:
    """Reads the round clock off the rows and deltas of the live members."""

    def __init__(
        self,
        manifest: Manifest,
        charter: Charter,
        roster: Roster,
        ledger: Ledger,
        *,
        own_last: Callable[[], int],
        trains: bool,
        unix_time: UnixTime,
    ) -> None:
        """`own_last`: the round that we published last. `trains`: whether we are a member of the clock."""
        self._manifest = manifest
        self._charter = charter
        self._roster = roster
        self._ledger = ledger
        self._own_last = own_last
        self._trains = trains
        self._unix_time = unix_time
        history = manifest.history
        self._ahead = limits.ROUND_SLACK + max(history.retain, history.seal_after + history.snapshot_every)
        self._near = 0

    def allows(self, round_: int, now: float) -> bool:
        """Whether the swarm is old enough for this round."""
        return is_plausible(round_, self._manifest, self._unix_time.latest(now))

    def is_near(self, round_: int, now: float) -> bool:
        """Whether a round is no further ahead of the swarm than one side of a partition can have got.

        A key could sign for every round that the swarm is old enough for, and have us keep them all. What is
        refused for this is offered again by whoever has it, and taken when the swarm has come near.
        """
        if round_ > self._near:
            self._near = self._ahead + self.read(now)
        return round_ <= self._near

    def read(self, now: float) -> int:
        """The round that the swarm is at. Who has never published has no say in it yet, but counts.

        A claim of the far future is nobody's: to follow it would be to sign what all others refuse. Where
        nobody has published who is there, we go on where those who are gone left off.
        """
        rounds = self._rounds_of_others()
        said = [round_ for round_ in (*rounds, self._own_last()) if round_ > 0]
        if said and not self.allows(max(said), now):
            said = [round_ for round_ in said if self.allows(round_, now)]
        if not said:
            return self._ledger.reached
        return max(self._ledger.floor, round_clock(said, members=len(rounds) + self._trains))

    def _rounds_of_others(self) -> list[int]:
        """The latest round of every live member that trains, 0 for one that has not published."""
        last_round, role_of = self._ledger.last_round, self._charter.role_of
        return [
            max(peer.body.round, last_round(peer.node_id))
            for peer in [member.peer for member in self._roster.live()]
            if peer.body.trains and role_of(peer.node_id) is Role.TRAIN
        ]
