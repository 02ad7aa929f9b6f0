"""How the node itself is doing: alone, out of reach, not the only one with its key, slow, out of space, on a
wrong clock. Each problem is logged once.

`Vitals` gets a `Look` every second, and has no other source. It logs one line per event, and the same event
not again within minutes: a node's owner should be told, but not be flooded.
"""

import logging
from collections import deque

from gossamer.node.monitoring.connectivity import Reach, Solitude, Supply
from gossamer.node.monitoring.keywatch import KeyWatch
from gossamer.node.monitoring.look import Look
from gossamer.node.monitoring.trainerwatch import TrainerWatch
from gossamer.node.network import clocks
from gossamer.node.seldom import SeldomWarnings
from gossamer.protocol.limits import SLEEP_MIN_S

SLOW_S = 1.0
STUCK_S = 120.0
"""Merging is stuck if rounds wait and none was merged for this long. A merge takes milliseconds to
seconds."""

DISK_FREE_MIN = 64 * 1024 * 1024
FILES_FREE_MIN = 1024
"""Each chunk is a file, and a file system may run out of files while it has space left."""

DAY_S = 86_400.0
LAGS = 60

log = logging.getLogger("gossamer.vitals")


class Vitals:
    """Judges looks, and logs what a person should know."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why this node is not healthy; None if it is."""
        self._warnings = SeldomWarnings(log)
        self._solitude = Solitude()
        self._reach = Reach()
        self._supply = Supply(self._warnings)
        self._trainer = TrainerWatch()
        self._key = KeyWatch(self._warnings)
        self._merged: tuple[int, float] = (-1, 0.0)
        """When there was last nothing to merge or a merge was made, and the count of merges then."""
        self._told_runs_out: float | None = None
        self._lags: deque[float] = deque(maxlen=LAGS)

    @property
    def reachable(self) -> bool | None:
        """Whether others can dial us; None while that is not known."""
        return self._reach.reachable

    @property
    def lag_s(self) -> float:
        """The longest time that the event loop was busy in the last minute."""
        return max(self._lags, default=0.0)

    def look(self, look: Look) -> None:
        """Judge how things are now."""
        self._lags.append(max(0.0, look.late_s))
        self._solitude.look(look)
        self._look_at_address(look)
        self._reach.look(look)
        self._supply.look(look)
        self._look_at_clock(look)
        self._look_at_invitation(look)
        self._look_at_merging(look)
        self._trainer.look(look)
        if SLOW_S < look.late_s <= SLEEP_MIN_S:  # longer: it slept or was stopped, which the core reports
            self._warnings.say(
                "slow",
                look.now,
                f"this node was busy for {look.late_s:.1f} s and answered nobody: it has too little CPU"
                " (train with fewer threads), or its disk hangs",
            )
        key = self._key.look(look)  # logged whatever else is wrong
        self.problem = (
            self._folder(look)
            or self._disk(look)
            or look.unstored
            or self._invitation(look)
            or self._model(look)
            or self._clock(look)
            or self._merging(look)
            or self._trainer.problem(look)
            or key
        )

    def _look_at_address(self, look: Look) -> None:
        if look.lost_address:
            self._warnings.say(
                "address",
                look.now,
                f"this machine no longer has the address {look.lost_address}, and --listen ties this node to"
                " that address: it is cut off. Give the machine that address back, or start the node with"
                " another --listen ([::]:PORT follows the machine)",
            )

    def _look_at_clock(self, look: Look) -> None:
        said = clocks.judge(look.offsets)
        if said is not None:
            self._warnings.say("clock", look.now, f"{said}: set it (NTP)")

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
        self._warnings.say("folder", look.now, f"{found}: {advice}")
        return found

    def _disk(self, look: Look) -> str | None:
        if look.disk_free is not None and look.disk_free < DISK_FREE_MIN:
            found = f"the disk is full: {look.disk_free >> 20} MiB are free"
        elif look.files_free is not None and look.files_free < FILES_FREE_MIN:
            found = f"the disk is full: it has room for {look.files_free} more files (df -i)"
        else:
            return None
        self._warnings.say("disk", look.now, f"{found}; publishing and fetching pause when nothing is left")
        return found

    def _invitation(self, look: Look) -> str | None:
        """Why the others turn us away, if they do. Whoever is linked all the same may have a slower clock."""
        return look.refused if look.refused and not look.links else None

    def _model(self, look: Look) -> str | None:
        if not look.diverged:
            return None
        found = f"the model diverged: {look.diverged}"
        self._warnings.say(
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
        self._warnings.say(
            "early",
            look.now,
            f"{found}, and what they publish is refused: set it (NTP), unless theirs was wrong when the"
            " swarm was made",
        )
        return found

    def _merging(self, look: Look) -> str | None:
        if look.now - self._merged[1] <= STUCK_S:
            return None
        found = f"merging is stuck: {look.behind} rounds are waiting, and none was merged for {STUCK_S:.0f} s"
        self._warnings.say("stuck", look.now, found)
        return found
