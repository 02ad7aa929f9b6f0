"""What peers have cost us and done wrong: budgets, points, and the log lines about them.

`protocol.access.rate_limits` decides. This module applies it to links and connections, and reads the clock.
"""

import logging
import time
from collections.abc import Callable

from gossamer.node.logs import RateLimit
from gossamer.protocol.access.rate_limits import (
    PER_ADDRESS,
    PER_NODE,
    Budgets,
    Greylist,
    Resource,
)
from gossamer.protocol.errors import Offence
from gossamer.protocol.identity import short

COMPLAINTS_MAX = 32
"""Most lines about peers in any five minutes, however many there are: keys cost nothing."""

log = logging.getLogger("gossamer.node")


class PeerScores:
    """Budgets and points of all peers, by node id and by address. An address is None for our own machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes = Budgets(PER_NODE)
        self._addresses = Budgets(PER_ADDRESS)
        self._greylist = Greylist()
        self._lines = RateLimit(clock, COMPLAINTS_MAX)
        self.blamed = 0
        self.turned_away = 0
        """Handshakes refused because the peer is on the greylist."""
        self.throttled = 0
        """How often a link was left unread for a while."""

    # -- budgets: each charge returns the seconds for which to leave the peer unread, or to let it wait

    def charge(self, node_id: bytes, origin: str | None, costs: dict[Resource, float]) -> float:
        """Charge a peer, and its address, for what it has sent; see `cost_of_message`."""
        now = self._clock()
        pause = self._nodes.spend(node_id, costs, now)
        if origin is not None:
            pause = max(pause, self._addresses.spend(origin, costs, now))
        self.throttled += pause > 0.0
        return pause

    def charge_misses(self, node_id: bytes, count: float = 1.0) -> float:
        """Charge a request for a chunk that was not sent, or brought little."""
        return self._nodes.spend(node_id, {Resource.MISSES: count}, self._clock())

    def charge_request(self, origin: str | None) -> float:
        """Charge an address for a request, except for members' chunks."""
        return self._addresses.spend(origin or "", {Resource.REQUESTS: 1.0}, self._clock())

    def may_connect(self, origin: str | None) -> bool:
        """Whether an address may open one more connection now."""
        return self._addresses.afford(origin or "", Resource.CONNECTIONS, self._clock())

    # -- misbehaviour

    def blame(self, node_id: bytes, reason: str, offence: Offence) -> bool:
        """Note an offence of a peer. Returns whether that was one too many: from now on it is refused."""
        self.blamed += 1
        name = short(node_id)
        self.complain(name, f"misbehaved: {reason}")
        if not self._greylist.add(node_id, offence, self._clock()):
            return False
        minutes = self.refused_for(node_id) / 60.0
        log.warning("%s is turned away for about %.0f min: it misbehaved too often", name, minutes)
        return True

    def blame_address(self, origin: str | None, offence: Offence) -> None:
        """Note that a hello from an address failed. Our own machine is never turned away."""
        if origin is not None and self._greylist.add(origin, offence, self._clock()):
            log.warning("connections from %s are turned away for a while: handshakes failed", origin)

    def refusal(self, node_id: bytes) -> str | None:
        """Why a peer that has proven its key gets no link now; None if it may have one."""
        seconds = self.refused_for(node_id)
        if seconds > 0.0:
            self.turned_away += 1
            return f"turned away for misbehaviour, for another {seconds:.0f} s"
        if not self._nodes.afford(node_id, Resource.HANDSHAKES, self._clock()):
            return f"too many handshakes; try again in {1.0 / PER_NODE[Resource.HANDSHAKES].rate:.0f} s"
        return None

    def refused_for(self, key: bytes | str | None) -> float:
        """Seconds for which a node id or an address is still turned away; 0 if it is not."""
        return 0.0 if key is None else self._greylist.remaining(key, self._clock())

    @property
    def greylisted(self) -> int:
        """Number of node ids and addresses that are turned away now."""
        return len(self._greylist.listed(self._clock()))

    # -- what a person reads

    def complain(self, who: str, what: str) -> None:
        """Log a line about a peer unless there was one lately."""
        if self._lines.allows(who):
            log.warning("%s %s", who, what)
