"""What peers have cost us and done wrong: budgets, points, and the log lines about them.

`protocol.admission.budget` and `protocol.admission.greylist` decide. This module applies them to the daemon's
links and connections, and reads the clock for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.node.daemon.network.links import PeerLink
from gossamer.protocol import limits
from gossamer.protocol.access.peer_scores import Greylist
from gossamer.protocol.access.rate_limits import PER_ADDRESS, PER_NODE, Budgets, Resource, cost_of_message
from gossamer.protocol.errors import Offence
from gossamer.protocol.identity import short

SWEEP_S = 5.0
COMPLAINT_INTERVAL_S = 30.0
"""Between the first two log lines about one peer; complaints in between are counted."""

COMPLAINT_INTERVAL_MAX_S = 300.0
"""If complaints go on, as with a join address that now leads to another node, each wait is twice as long as
the one before, up to this."""

COMPLAINTS_MAX = 16
"""Peers with log lines of their own at a time; the others are counted together."""

OTHERS = "other peers"

log = logging.getLogger("gossamer.node")


@dataclass(slots=True)
class _Complaint:
    due: float
    wait: float = COMPLAINT_INTERVAL_S
    unsaid: int = 0
    last: str = ""


class PeerScores:
    """Watches over peers. `turn_away` is called with the node id of a peer that has misbehaved too often."""

    def __init__(
        self,
        turn_away: Callable[[bytes], None] = lambda node_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn_away = turn_away
        self._clock = clock
        self._nodes = Budgets(PER_NODE)
        self._addresses = Budgets(PER_ADDRESS)
        self._greylist = Greylist()
        self._complaints: dict[str, _Complaint] = {}
        self.blamed = 0
        self.turned_away = 0
        """Handshakes refused because the peer is on the greylist."""
        self.throttled = 0
        """How often a link was left unread for a while."""

    # -- budgets

    def heard(self, link: PeerLink, received: int, cpu_s: float, fresh: int) -> float:
        """Charge a peer for a message; returns the seconds for which to leave its link unread."""
        sent, link.traffic.charged = link.traffic.sent - link.traffic.charged, link.traffic.sent
        costs = cost_of_message(received=received, sent=sent, cpu_s=cpu_s, fresh=fresh)
        return self._charge(link.node_id, link.origin, costs)

    def parsed(self, node_id: bytes, origin: str | None, cpu_s: float) -> float:
        """Charge a peer for bytes that took `cpu_s` to parse, whether or not they became a message."""
        return self._charge(node_id, origin, {Resource.CPU: cpu_s})

    def missed(self, node_id: bytes) -> float:
        """A peer asked for a chunk that is not here; returns the seconds for which to let it wait."""
        return self._miss(node_id, 1.0)

    def gave_little(self, node_id: bytes) -> float:
        """A peer was sent a small chunk; returns the seconds for which to let it wait."""
        return self._miss(node_id, 1.0)

    def declined(self, node_id: bytes) -> float:
        """A peer asked for a chunk and was declined; returns the seconds for which to let it wait."""
        return self._miss(node_id, limits.DECLINED_MISSES)

    def asked(self, origin: str | None) -> float:
        """Charge an address for a request, except for members' chunks; returns the seconds to let it wait."""
        return self._addresses.spend(origin or "", {Resource.REQUESTS: 1.0}, self._clock())

    def may_connect(self, origin: str | None) -> bool:
        """Whether an address may open one more connection now."""
        return self._addresses.afford(origin or "", Resource.CONNECTIONS, self._clock())

    def _miss(self, node_id: bytes, count: float) -> float:
        return self._nodes.spend(node_id, {Resource.MISSES: count}, self._clock())

    def _charge(self, node_id: bytes, origin: str | None, costs: dict[Resource, float]) -> float:
        now = self._clock()
        pause = self._nodes.spend(node_id, costs, now)
        if origin is not None:
            pause = max(pause, self._addresses.spend(origin, costs, now))
        self.throttled += pause > 0.0
        return pause

    # -- misbehaviour

    def blame(self, node_id: bytes, reason: str, offence: Offence) -> None:
        """Note an offence of a peer; turn the peer away if that was one too many."""
        self.blamed += 1
        name = short(node_id)
        self.complain(name, f"misbehaved: {reason}")
        if self._greylist.add(node_id, offence, self._clock()):
            self._said_last(name)
            minutes = self._greylist.remaining(node_id, self._clock()) / 60.0
            log.warning("%s is turned away for about %.0f min: it misbehaved too often", name, minutes)
            self._turn_away(node_id)

    def blame_address(self, origin: str | None, reason: str, *, stalled: bool = False) -> None:
        """Note that a connection from an address failed to prove a key, or to say anything in time. Our own
        machine is never turned away."""
        offence = Offence.STALLED if stalled else Offence.HANDSHAKE
        if origin is not None and self._greylist.add(origin, offence, self._clock()):
            log.warning("connections from %s are turned away for a while: %s", origin, reason)

    def refusal(self, node_id: bytes) -> str | None:
        """Why a peer that has proven its key gets no link now; None if it may have one."""
        seconds = self._greylist.remaining(node_id, self._clock())
        if seconds > 0.0:
            self.turned_away += 1
            return f"turned away for misbehaviour, for another {seconds:.0f} s"
        if not self._nodes.afford(node_id, Resource.HANDSHAKES, self._clock()):
            return "too many handshakes; try again later"
        return None

    def is_greylisted(self, key: bytes | str | None) -> bool:
        """Whether a node id or an address is turned away now."""
        return key is not None and self._greylist.remaining(key, self._clock()) > 0.0

    @property
    def greylisted(self) -> int:
        """Number of node ids and addresses that are turned away now."""
        return len(self._greylist.listed(self._clock()))

    # -- what a person reads

    def complain(self, who: str, what: str) -> None:
        """Log a line about a peer, or only count it if there was one lately."""
        if who not in self._complaints and len(self._complaints) >= COMPLAINTS_MAX:
            who = OTHERS
        complaint = self._complaints.get(who)
        if complaint is None:
            self._complaints[who] = _Complaint(self._clock() + COMPLAINT_INTERVAL_S)
            log.warning("%s %s", who, what)
        else:
            complaint.unsaid += 1
            complaint.last = what

    def sweep(self) -> None:
        """Log what was counted, and which peers are let in again."""
        now = self._clock()
        for who in [who for who, complaint in self._complaints.items() if complaint.due <= now]:
            if not self._said_last(who):
                del self._complaints[who]
        for key in self._greylist.released(now):
            log.warning("%s is let in again", short(key) if isinstance(key, bytes) else key)

    def _said_last(self, who: str) -> bool:
        """Log what was counted about a peer, or about it and all others. Returns whether anything was."""
        who = who if who in self._complaints else OTHERS
        complaint = self._complaints[who]
        if not complaint.unsaid:
            return False
        log.warning("%s (%d more times) %s", who, complaint.unsaid, complaint.last)
        complaint.wait = min(2 * complaint.wait, COMPLAINT_INTERVAL_MAX_S)
        complaint.unsaid, complaint.due = 0, self._clock() + complaint.wait
        return True

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()
