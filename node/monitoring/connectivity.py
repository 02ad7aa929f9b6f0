"""How a node stands with the others: whether it has links, can be dialled, and gets what it lacks.

What is found is logged, once for each time that it happens.
"""

import logging
import math

from gossamer.node.monitoring.look import Look
from gossamer.node.seldom import SeldomWarnings

ALONE_S = 30.0
REACH_S = 600.0
"""By then, a node that can be dialled usually has been: each newcomer looks for six links."""

MEMBERS_MIN = 2
"""With fewer other members up, it means nothing that nobody has dialled us."""

STARVED_S = 300.0
"""Others hold what this node lacks, and nothing has come for this long."""

UNHELD_S = 60.0
"""No linked node has had what a joining node lacks for this long. Who fetches it itself soon holds it."""

HELD_KEPT_S = 120.0
"""For how long it counts that others held what is missing: a holder that failed is not believed until it
holds something else."""

log = logging.getLogger("gossamer.vitals")


class Solitude:
    """Tells when this node has had no link for long, and when it has some again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_told = False

    def look(self, look: Look) -> None:
        if look.links:
            if self._is_told and self._since is not None:
                log.info("linked to others again after %.0f s", look.now - self._since)
            self._since, self._is_told = None, False
            return
        if self._since is None:
            self._since = look.now
        if not self._is_told and look.known and look.now - self._since > ALONE_S:
            self._is_told = True
            log.warning(
                "alone: no link for %.0f s. Still dialling the %d known address%s; %s",
                ALONE_S,
                look.known,
                "" if look.known == 1 else "es",
                _advice_alone(look),
            )


class Reach:
    """Whether others can dial this node."""

    def __init__(self) -> None:
        self.reachable: bool | None = None
        """None while that is not known."""
        self._addresses: tuple[str, ...] = ()
        self._since = -math.inf
        """Since when there have been others to dial us at these addresses, none of which was withdrawn."""
        self._dialled = self._dialled_by_then = 0
        """How often others have dialled us: up to now, and up to `_since`."""

    def look(self, look: Look) -> None:
        """A node that could be dialled in one network may be behind a NAT in the next: when an address goes,
        start over."""
        if self._since == -math.inf or set(self._addresses) - set(look.addresses):
            self.reachable, self._since, self._dialled_by_then = None, look.now, self._dialled
        self._addresses, self._dialled = look.addresses, look.dialled_by_others
        if look.dialled_by_others > self._dialled_by_then:
            self.reachable = True
        elif not look.addresses or look.live < MEMBERS_MIN or not look.links:
            self.reachable, self._since = None, look.now
        elif look.now - self._since > REACH_S and self.reachable is None:
            self.reachable = False
            log.warning(
                "nobody has dialled this node at %s within %.0f minutes: if a firewall or NAT is in the way,"
                " open or forward that port, or set --advertise HOST:PORT. The node trains all the same: it"
                " dials others",
                ", ".join(look.addresses),
                REACH_S / 60,
            )


class Supply:
    """Tells when nothing comes that others hold, and when none of them holds what this node begins with."""

    def __init__(self, warnings: SeldomWarnings) -> None:
        self._warnings = warnings
        self._came = 0
        self._held_at = self._starved_since = -math.inf
        """When others last held something that is missing here, and since when nothing has come."""
        self._unheld_since: float | None = None

    def look(self, look: Look) -> None:
        """Judge how things are now."""
        self._look_for_holders(look)
        self._look_for_bytes(look)

    def _look_for_holders(self, look: Look) -> None:
        """Whoever trained on before may be gone, with all that others had not fetched yet."""
        if look.is_ready or look.others_hold or not look.missing or not look.links:
            self._unheld_since = None
        elif self._unheld_since is None:
            self._unheld_since = look.now
        elif look.now - self._unheld_since > UNHELD_S:
            self._warnings.say(
                "unheld",
                look.now,
                f"joining: no linked node holds any of the {look.missing} missing payloads or snapshots."
                " Start one that does: a node that trained here before, or another full replica",
            )

    def _look_for_bytes(self, look: Look) -> None:
        """Links may carry small messages and still nothing larger."""
        has_come = look.came != self._came
        if has_come or not look.missing or not look.links or look.now - self._held_at > HELD_KEPT_S:
            self._came, self._starved_since = look.came, look.now
        if not look.others_hold:
            return
        self._held_at = look.now
        if look.now - self._starved_since > STARVED_S:
            self._warnings.say(
                "starved",
                look.now,
                f"no part of {look.missing} missing payloads or snapshots has arrived for"
                f" {STARVED_S / 60:.0f} minutes, though linked nodes hold some: the path to them is too"
                " slow, or drops long packets, as a VPN or tunnel may. Try a lower MTU on this machine: ip"
                " link set dev INTERFACE mtu 1280",
            )


def _advice_alone(look: Look) -> str:
    if look.refused:
        return f"they no longer let this node in: {look.refused}"
    if not look.has_model:
        return (
            "this node has no model yet, and nobody to get it from: start a node of the swarm, and check this"
            " machine's network, and --join"
        )
    later = "work done meanwhile is passed on later; " if look.trains else ""
    return f"{later}check this machine's network, and --join"
