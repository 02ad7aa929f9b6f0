"""How the node itself is doing: alone, out of reach, not the only one with its key, slow, out of space, on a
wrong clock. Each problem is logged once.

`Vitals` gets a `Look` every second, and has no other source. It logs one line per event, and the same event
not again within minutes: a node's owner should be told, but not be flooded.
"""

import logging
import math
from collections import deque

from gossamer.node.monitoring.look import Look
from gossamer.node.network import clocks
from gossamer.node.seldom import Seldom
from gossamer.protocol.limits import SLEEP_MIN_S

ALONE_S = 30.0
REACH_S = 600.0
"""By then, a node that can be dialled usually has been: each newcomer looks for six links."""

MEMBERS_MIN = 2
"""With fewer other members up, it means nothing that nobody has dialled us."""

SLOW_S = 1.0
STARVED_S = 300.0
"""Others hold what this node lacks, and nothing has come for this long."""

HELD_KEPT_S = 120.0
"""For how long it counts that others held what is missing: a holder that failed is not believed until it
holds something else."""

STUCK_S = 120.0
"""Merging is stuck if rounds wait and none was merged for this long. A merge takes milliseconds to
seconds."""

TRAINER_S = 120.0
STANDSTILL_S = 900.0
"""How late a trainer's next step must be before it is reported: it may evaluate, or compile its first
step."""

STARTS_MAX, STARTS_S = 5, 600.0
"""A trainer that was started this often within ten minutes ends again and again, until one stays."""

DISK_FREE_MIN = 64 * 1024 * 1024
FILES_FREE_MIN = 1024
"""Each chunk is a file, and a file system may run out of files while it has space left."""

DAY_S = 86_400.0
LAGS = 60

KEY_S = 600.0
"""For how long after the last sign that another node has our key this node counts as unhealthy."""

OUTDONE_MAX = 2
"""After a clock was set back, our rows of before are newer than ours now: we outdo them, once or twice."""

log = logging.getLogger("gossamer.vitals")


class Vitals:
    """Judges looks, and logs what a person should know."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why this node is not healthy; None if it is."""
        self.reachable: bool | None = None
        """Whether others can dial us; None while that is not known."""
        self._told_addresses: tuple[str, ...] = ()
        self._told_since = -math.inf
        """Since when there have been others to dial us at these addresses, none of which was withdrawn."""
        self._dialled = self._dialled_by_then = 0
        """How often others have dialled us: up to now, and up to `_told_since`."""
        self._alone_since: float | None = None
        self._told_alone = False
        self._merged: tuple[int, float] = (-1, 0.0)
        self._came = 0
        self._held_at = self._starved_since = -math.inf
        """When others last held something that is missing here, and since when nothing has come."""
        self._trainer_seen = math.inf
        """When there was last a trainer, or at first, when we first looked."""
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        """When the last trainers came."""
        self._started = 0
        self._told_standstill = False
        self._void = 0
        self._outdone = 0
        self._signed_elsewhere = -math.inf
        """When there was last a sign that another node has our key."""
        self._told_runs_out: float | None = None
        self._seldom = Seldom()
        self._lags: deque[float] = deque(maxlen=LAGS)

    @property
    def lag_s(self) -> float:
        """The longest time that the event loop was busy in the last minute."""
        return max(self._lags, default=0.0)

    def look(self, look: Look) -> None:
        """Judge how things are now."""
        self._lags.append(max(0.0, look.late_s))
        self._look_at_links(look)
        self._look_at_address(look)
        self._look_at_reach(look)
        self._look_at_transfers(look)
        self._look_at_clock(look)
        self._look_at_invitation(look)
        self._look_at_merging(look)
        self._look_at_trainer(look)
        if SLOW_S < look.late_s <= SLEEP_MIN_S:  # longer: it slept or was stopped, which the core reports
            self._say(
                "slow",
                look.now,
                f"this node was busy for {look.late_s:.1f} s and answered nobody: it has too little CPU"
                " (train with fewer threads), or its disk hangs",
            )
        key = self._key(look)  # logged whatever else is wrong
        self.problem = (
            self._folder(look)
            or self._disk(look)
            or look.unstored
            or self._invitation(look)
            or self._model(look)
            or self._clock(look)
            or self._merging(look)
            or self._trainer(look)
            or key
        )

    def _look_at_links(self, look: Look) -> None:
        if look.links:
            if self._told_alone and self._alone_since is not None:
                log.info("linked to others again after %.0f s", look.now - self._alone_since)
            self._alone_since, self._told_alone = None, False
            return
        if self._alone_since is None:
            self._alone_since = look.now
        if not self._told_alone and look.known and look.now - self._alone_since > ALONE_S:
            self._told_alone = True
            log.warning(
                "alone: no link for %.0f s. Still dialling the %d known address%s; %s",
                ALONE_S,
                look.known,
                "" if look.known == 1 else "es",
                _advice_alone(look),
            )

    def _look_at_address(self, look: Look) -> None:
        if look.lost_address:
            self._say(
                "address",
                look.now,
                f"this machine no longer has the address {look.lost_address}, and --listen ties this node to"
                " that address: it is cut off. Give the machine that address back, or start the node with"
                " another --listen ([::]:PORT follows the machine)",
            )

    def _look_at_reach(self, look: Look) -> None:
        """A node that could be dialled in one network may be behind a NAT in the next: when an address goes,
        start over."""
        if self._told_since == -math.inf or set(self._told_addresses) - set(look.addresses):
            self.reachable, self._told_since, self._dialled_by_then = None, look.now, self._dialled
        self._told_addresses, self._dialled = look.addresses, look.dialled_by_others
        if look.dialled_by_others > self._dialled_by_then:
            self.reachable = True
        elif not look.addresses or look.live < MEMBERS_MIN or not look.links:
            self.reachable, self._told_since = None, look.now
        elif look.now - self._told_since > REACH_S and self.reachable is None:
            self.reachable = False
            log.warning(
                "nobody has dialled this node at %s within %.0f minutes: if a firewall or NAT is in the way,"
                " open or forward that port, or set --advertise HOST:PORT. The node trains all the same: it"
                " dials others",
                ", ".join(look.addresses),
                REACH_S / 60,
            )

    def _look_at_transfers(self, look: Look) -> None:
        """Warn if nothing comes that others hold. Links may carry small messages and still nothing larger."""
        has_come = look.came != self._came
        if has_come or not look.missing or not look.links or look.now - self._held_at > HELD_KEPT_S:
            self._came, self._starved_since = look.came, look.now
        if not look.others_hold:
            return
        self._held_at = look.now
        if look.now - self._starved_since > STARVED_S:
            self._say(
                "starved",
                look.now,
                f"no part of {look.missing} missing payloads or snapshots has arrived for"
                f" {STARVED_S / 60:.0f} minutes, though linked nodes hold some: the path to them is too"
                " slow, or drops long packets, as a VPN or tunnel may. Try a lower MTU on this machine: ip"
                " link set dev INTERFACE mtu 1280",
            )

    def _look_at_clock(self, look: Look) -> None:
        said = clocks.judge(look.offsets)
        if said is not None:
            self._say("clock", look.now, f"{said}: set it (NTP)")

    def _look_at_invitation(self, look: Look) -> None:
        if not look.runs_out:
            self._told_runs_out = None
        elif self._told_runs_out is None or look.now - self._told_runs_out >= DAY_S:
            self._told_runs_out = look.now
            log.warning("%s: gossamer invite NODE_ID --tell ADDRESS", look.runs_out)

    def _look_at_merging(self, look: Look) -> None:
        # Nothing can be merged before the model is here, which may take hours on a slow line.
        if not look.behind or not look.has_model or look.version != self._merged[0]:
            self._merged = (look.version, look.now)

    def _look_at_trainer(self, look: Look) -> None:
        if look.starts > self._started:
            self._started, self._told_standstill = look.starts, False
            self._starts.append(look.now)
        if not look.lacks_trainer or self._trainer_seen == math.inf:
            self._trainer_seen = look.now

    def _folder(self, look: Look) -> str | None:
        if look.folder_gone:
            found = f"the folder {look.folder_gone} no longer exists"
            advice = "what this node learns now is not saved. Put the folder back, or stop the node"
        elif look.folder_read_only:
            found = f"the folder {look.folder_read_only} cannot be written to"
            advice = (
                "nothing is published or fetched until it can be. Does it belong to this user? Did errors"
                " make its disk read-only?"
            )
        elif look.file_lost:
            found = f"the file {look.file_lost} no longer exists"
            advice = (
                "put it back before restarting this node: without its key it would be another node, without"
                " its manifest no node at all, and without its ledger it must get all records from others"
            )
        else:
            return None
        self._say("folder", look.now, f"{found}: {advice}")
        return found

    def _disk(self, look: Look) -> str | None:
        if look.disk_free is not None and look.disk_free < DISK_FREE_MIN:
            found = f"the disk is full: {look.disk_free >> 20} MiB are free"
        elif look.files_free is not None and look.files_free < FILES_FREE_MIN:
            found = f"the disk is full: it has room for {look.files_free} more files (df -i)"
        else:
            return None
        self._say("disk", look.now, f"{found}; publishing and fetching pause when nothing is left")
        return found

    def _invitation(self, look: Look) -> str | None:
        """Why the others turn us away, if they do. Whoever is linked all the same may have a slower clock."""
        return look.refused if look.refused and not look.links else None

    def _model(self, look: Look) -> str | None:
        if not look.diverged:
            return None
        found = f"the model diverged: {look.diverged}"
        self._say(
            "diverged",
            look.now,
            f"{found}. Nothing is published until an owner revokes the member that caused it (gossamer"
            " revoke); or start a new swarm from what gossamer export --sealed writes",
        )
        return found

    def _clock(self, look: Look) -> str | None:
        if not look.contradicted:
            return None
        found = "by this machine's clock, it is too early for the round that the other nodes are at"
        self._say(
            "early",
            look.now,
            f"{found}, and what they publish is refused: set it (NTP), unless theirs was wrong when the"
            " swarm was made",
        )
        return found

    def _key(self, look: Look) -> str | None:
        if look.void > self._void:
            self._signed_elsewhere = look.now
            self._say(
                "key",
                look.now,
                "what this node publishes is void: its key signs other deltas for the same rounds elsewhere,"
                " in a copy of its folder, or did so before an old copy was restored. Stop all but one; to"
                " make a copy a node of its own, remove the file key from it",
            )
        elif look.outdone > max(self._outdone, OUTDONE_MAX):
            self._signed_elsewhere = look.now
            self._say(
                "twin",
                look.now,
                "another node runs with this one's key, in a copy of its folder: each cuts the other's links,"
                " and what both publish for a round is void. Stop all but one; to make a copy a node of its"
                " own, remove the file key from it",
            )
        self._void, self._outdone = look.void, look.outdone
        if look.now - self._signed_elsewhere > KEY_S:
            return None
        return (
            "its key also signs elsewhere, or did before its folder was restored: what it publishes is void"
        )

    def _merging(self, look: Look) -> str | None:
        if look.now - self._merged[1] <= STUCK_S:
            return None
        found = f"merging is stuck: {look.behind} rounds are waiting, and none was merged for {STUCK_S:.0f} s"
        self._say("stuck", look.now, found)
        return found

    def _trainer(self, look: Look) -> str | None:
        if look.now - self._trainer_seen > TRAINER_S:
            return f"there has been no trainer for {TRAINER_S:.0f} s"
        are_many = len(self._starts) == STARTS_MAX and look.now - self._starts[0] < STARTS_S
        if are_many and look.now - self._starts[-1] < TRAINER_S:
            within = f"{STARTS_S / 60:.0f} minutes"
            return f"the trainer keeps ending: it was started {STARTS_MAX} times within {within}"
        if look.overdue_s <= STANDSTILL_S:
            return None
        found = f"the trainer has not taken a step for {STANDSTILL_S / 60:.0f} minutes: is it stuck?"
        if not self._told_standstill:  # once per trainer: a notebook may rest for long, again and again
            log.warning("%s", found)
        self._told_standstill = True
        return found

    def _say(self, event: str, now: float, text: str) -> None:
        """Warn of an event, unless that was done within minutes."""
        if self._seldom.is_due(event, now):
            log.warning("%s", text)


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
