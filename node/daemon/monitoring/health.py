"""How the node itself is doing: alone, out of reach, not the only one with its key, slow, out of space, on a
wrong clock. Each problem is logged once.

`Vitals` gets a `Look` every second, and has no other source. It logs one line per event, and the same event
not again within minutes: a node's owner should be told, but not be flooded.
"""

import logging
import math
from collections import deque
from dataclasses import dataclass

from gossamer.node.daemon.network import clocks
from gossamer.node.logs import RateLimit
from gossamer.protocol.limits import SLEEP_MIN_S

# --- What the vitals judge: one look at the node, taken every second.


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The node at one moment."""

    now: float
    """Seconds of the local monotonic clock."""
    late_s: float = 0.0
    """How much later than planned we look: the event loop was busy for this long."""
    links: int = 0
    dialled_by_others: int = 0
    """How often other nodes have linked to us since we started."""
    addresses: tuple[str, ...] = ()
    """Where we say that we can be dialled."""
    lost_address: str = ""
    """The address that we listen on and dial from, if this machine no longer has it."""
    live: int = 0
    """Other members believed to be up."""
    known: int = 0
    """Addresses that lead, or once led, to others."""
    behind: int = 0
    """Rounds that wait to be merged."""
    came: int = 0
    """Bytes of payloads and snapshots that have come from others."""
    missing: int = 0
    """Payloads and snapshots that are wanted and not complete here."""
    others_hold: bool = False
    """Whether a linked node says that it holds some of these."""
    has_model: bool = True
    """Whether the node has the swarm's model."""
    is_ready: bool = True
    """Whether it has all that it begins with: that model, and what has been published since."""
    trains: bool = True
    runs_out: str = ""
    """A warning about this node's invitation, if it ends within days."""
    refused: str = ""
    """Why members no longer let this node in, by the credentials that it knows."""
    version: int = 0
    """Counts merges."""
    diverged: str = ""
    """What is out of range in the model, if anything is."""
    disk_free: int | None = None
    """Bytes; None if not known."""
    files_free: int | None = None
    """How many more files fit on the disk; None if not known, or unbounded."""
    folder_gone: str = ""
    """The node's folder, if it is not where it was."""
    folder_read_only: str = ""
    """The node's folder or one in it, if this user cannot write to it."""
    file_lost: str = ""
    """A file that the node needs at its next start, if it is no longer there."""
    unstored: str = ""
    """Why something cannot be stored, as the log says, if anything cannot."""
    offsets: tuple[float | None, ...] = ()
    """How many seconds the clocks of peers are ahead of ours."""
    contradicted: bool = False
    """Whether most others are at rounds that are not possible yet by our clock."""
    lacks_trainer: bool = False
    overdue_s: float = 0.0
    """How much later than usual the trainer's next step is, if it has one to do."""
    starts: int = 0
    """How many trainers have come since the daemon started."""
    void: int = 0
    """In how many rounds of this run our own deltas are void."""
    outdone: int = 0
    """How often a row of this node came that was newer than our own."""


# --- How a node stands with the others: whether it has links, can be dialled, and gets what it lacks.
#
# What is found is logged, once for each time that it happens.

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

    def __init__(self, warnings: RateLimit) -> None:
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
            self._warnings.warn(
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
            self._warnings.warn(
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


# --- Whether another node has this one's key: a copy of its folder runs, or a copy was put back.

KEY_S = 600.0
"""For how long after the last sign that another node has our key this node counts as unhealthy."""

OUTDONE_MAX = 2
"""After a clock was set back, our rows of before are newer than ours now: we outdo them, once or twice."""


class KeyWatch:
    """Looks for what another node has signed with our key."""

    def __init__(self, warnings: RateLimit) -> None:
        self._warnings = warnings
        self._void = 0
        self._outdone = 0
        self._signed_elsewhere = -math.inf
        """When there was last a sign that another node has our key."""

    def look(self, look: Look) -> str | None:
        """The problem that this is; None if there was no sign of it lately."""
        if look.void > self._void:
            self._signed_elsewhere = look.now
            self._warnings.warn(
                "key",
                look.now,
                "what this node publishes is void: its key signs other deltas for the same rounds elsewhere,"
                " in a copy of its folder, or did so before an old copy was restored. Stop all but one; to"
                " make a copy a node of its own, remove the file key from it",
            )
        elif look.outdone > max(self._outdone, OUTDONE_MAX):
            self._signed_elsewhere = look.now
            self._warnings.warn(
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


# --- Whether the trainer is there, stays, and takes steps.

TRAINER_S = 120.0
STANDSTILL_S = 900.0
"""How late a trainer's next step must be before it is reported: it may evaluate, or compile its first
step."""

STARTS_MAX, STARTS_S = 5, 600.0
"""A trainer that was started this often within ten minutes ends again and again, until one stays."""


class TrainerWatch:
    """Watches a node's trainers, one after another."""

    def __init__(self) -> None:
        self._seen = math.inf
        """When there was last a trainer, or at first, when we first looked."""
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        """When the last trainers came."""
        self._started = 0
        self._told_standstill = False

    def look(self, look: Look) -> None:
        """Note who has come and gone."""
        if look.starts > self._started:
            self._started, self._told_standstill = look.starts, False
            self._starts.append(look.now)
        if not look.lacks_trainer or self._seen == math.inf:
            self._seen = look.now

    def problem(self, look: Look) -> str | None:
        """What is wrong with the trainer; None if nothing is."""
        if look.now - self._seen > TRAINER_S:
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


SLOW_S = 1.0
STUCK_S = 120.0
"""Merging is stuck if rounds wait and none was merged for this long. A merge takes milliseconds to
seconds."""

DISK_FREE_MIN = 64 * 1024 * 1024
FILES_FREE_MIN = 1024
"""Each chunk is a file, and a file system may run out of files while it has space left."""

DAY_S = 86_400.0
LAGS = 60


class Vitals:
    """Judges looks, and logs what a person should know."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why this node is not healthy; None if it is."""
        self._warnings = RateLimit(log)
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
            self._warnings.warn(
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
            self._warnings.warn(
                "address",
                look.now,
                f"this machine no longer has the address {look.lost_address}, and --listen ties this node to"
                " that address: it is cut off. Give the machine that address back, or start the node with"
                " another --listen ([::]:PORT follows the machine)",
            )

    def _look_at_clock(self, look: Look) -> None:
        said = clocks.judge(look.offsets)
        if said is not None:
            self._warnings.warn("clock", look.now, f"{said}: set it (NTP)")

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
        self._warnings.warn("folder", look.now, f"{found}: {advice}")
        return found

    def _disk(self, look: Look) -> str | None:
        if look.disk_free is not None and look.disk_free < DISK_FREE_MIN:
            found = f"the disk is full: {look.disk_free >> 20} MiB are free"
        elif look.files_free is not None and look.files_free < FILES_FREE_MIN:
            found = f"the disk is full: it has room for {look.files_free} more files (df -i)"
        else:
            return None
        self._warnings.warn("disk", look.now, f"{found}; publishing and fetching pause when nothing is left")
        return found

    def _invitation(self, look: Look) -> str | None:
        """Why the others turn us away, if they do. Whoever is linked all the same may have a slower clock."""
        return look.refused if look.refused and not look.links else None

    def _model(self, look: Look) -> str | None:
        if not look.diverged:
            return None
        found = f"the model diverged: {look.diverged}"
        self._warnings.warn(
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
        self._warnings.warn(
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
        self._warnings.warn("stuck", look.now, found)
        return found
