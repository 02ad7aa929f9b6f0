"""How the node itself is doing: a table of checks over its status, which are made once a second.

To add a check, add a row to `CHECKS`. What a check finds is logged when it begins, and again only after
minutes: a node's owner should be told, but not be flooded. A problem also makes the node unhealthy:
``/healthz`` answers 503 with the first problem in the order of the table.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from statistics import median_high, median_low
from typing import Any

from gossamer.node.daemon.monitoring.status import NodeStatus
from gossamer.node.home import runs_out_soon
from gossamer.node.logs import REPEAT_S
from gossamer.protocol.limits import LINK_SILENCE_S

HOUR_S, DAY_S = 3600.0, 86_400.0

DISK_FREE_MIN = 64 * 1024 * 1024
FILES_FREE_MIN = 1024
"""Each chunk is a file, and a file system may run out of files while it has space left."""

STUCK_S = 120.0
"""A merge takes milliseconds to seconds."""

TRAINER_S = 120.0
STANDSTILL_S = 900.0
"""How late a trainer's next step must be: it may evaluate, or compile its first step."""

STARTS_FREE = 2
"""A trainer may be started so often before it counts as one that keeps ending."""

KEY_S = 600.0
"""For how long after the last sign that another node has our key this node counts as unhealthy."""

ALONE_S = 30.0
REACH_S = 600.0
"""By then, a node that can be dialled usually has been: each newcomer looks for six links."""

MEMBERS_MIN = 2
"""With fewer other members up, it means nothing that nobody has dialled us."""

STARVED_S = 300.0

SLOW_S = 1.0
CLOCK_OFF_S = 30.0
log = logging.getLogger("gossamer.health")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    finds: Callable[[NodeStatus, NodeStatus], object]
    """What is wrong and what to do, by the status now and the one before; something false if nothing is."""
    is_problem: bool = True
    """Whether the node is unhealthy while this finds something."""
    after_s: float = 0.0
    """How long something must have been wrong without a break."""
    progress: Callable[[NodeStatus], Any] = lambda now: None
    """While this changes, `after_s` starts over."""
    lasts_s: float = 0.0
    """For how long a finding stays one after it was found last."""
    repeat_s: float = REPEAT_S
    """How long it is not logged again."""


CHECKS = (
    Check(
        name="space",
        finds=lambda now, _: (
            (now.disk_free < DISK_FREE_MIN or now.vitals.files_free < FILES_FREE_MIN)
            and f"the disk is full: {now.disk_free >> 20} MiB, {now.vitals.files_free} files are free;"
            " publishing and fetching pause when nothing is left"
        ),
    ),
    Check(
        name="refused",
        finds=lambda now, _: (
            not now.links and now.vitals.refusal
        ),  # whoever is linked may have a slower clock
    ),
    Check(
        name="diverged",
        finds=lambda now, _: (
            now.vitals.diverged
            and f"the model diverged: {now.vitals.diverged}; nothing is published until an owner revokes"
            " the member that caused it (gossamer revoke); or start a new swarm from what gossamer export"
            " --sealed writes"
        ),
    ),
    Check(
        name="early",
        finds=lambda now, _: (
            now.vitals.clock_contradicted
            and "by this machine's clock, it is too early for the round that the other nodes are at; what"
            " they publish is refused: set it (NTP), unless theirs was wrong when the swarm was made"
        ),
    ),
    Check(
        name="merging",
        # Nothing can be merged before the model is here, which may take hours on a slow line.
        finds=lambda now, _: (
            (now.rounds_behind and now.vitals.has_model)
            and f"merging is stuck: {now.rounds_behind} rounds are waiting, and none was merged for"
            f" {STUCK_S:.0f} s; restart the node, and report this with its log"
        ),
        progress=lambda now: now.version,
        after_s=STUCK_S,
    ),
    Check(
        name="no trainer",
        finds=lambda now, _: (
            (now.trains and not now.vitals.has_trainer)
            and f"there has been no trainer for {TRAINER_S:.0f} s; start it again; its own log says why it"
            " ended"
        ),
        after_s=TRAINER_S,
    ),
    Check(
        name="trainer ends",
        finds=lambda now, before: (
            now.vitals.trainer_starts > max(before.vitals.trainer_starts, STARTS_FREE)
            and f"the trainer has been started {now.vitals.trainer_starts} times, and just now again; if it"
            " keeps ending, its own log says why"
        ),
        lasts_s=TRAINER_S,
    ),
    Check(
        name="standstill",
        finds=lambda now, _: (
            now.vitals.step_overdue_s > STANDSTILL_S
            and f"the trainer has not taken a step for {STANDSTILL_S / 60:.0f} minutes: is it stuck?"
        ),
        repeat_s=HOUR_S,  # a notebook may rest for long, again and again
    ),
    Check(
        name="key",
        finds=lambda now, before: (
            now.vitals.own_void > before.vitals.own_void
            and "this node's key signs elsewhere, in a copy of its folder, or did so before an old copy was"
            " restored: what it publishes is void; stop all but one; to make a copy a node of its own, remove"
            " the file key from it"
        ),
        lasts_s=KEY_S,
    ),
    Check(
        name="alone",
        finds=lambda now, _: (
            (now.vitals.known_addresses and not now.links)  # a founder that waits dials nobody
            and f"alone: no link for {ALONE_S:.0f} s, though this node dials {now.vitals.known_addresses}"
            f" known address(es); {_why_alone(now)}"
        ),
        is_problem=False,
        after_s=ALONE_S,
        repeat_s=HOUR_S,
    ),
    Check(
        name="undialled",
        finds=lambda now, _: (
            (now.addresses and now.links and now.live >= MEMBERS_MIN and not now.reachable)
            and f"nobody has dialled this node at {', '.join(now.addresses)} within {REACH_S / 60:.0f}"
            " minutes; if a firewall or NAT is in the way, open or forward that port, or set --advertise"
            " HOST:PORT. The node trains all the same: it dials others"
        ),
        is_problem=False,
        progress=lambda now: now.addresses,
        after_s=REACH_S,
        repeat_s=DAY_S,
    ),
    Check(
        name="starved",
        # Later, what is missing may be gone with its author for good.
        finds=lambda now, _: (
            (now.payloads_missing and now.links and not now.vitals.is_ready)
            and f"joining: no part of {now.payloads_missing} missing payloads or snapshots has arrived for"
            f" {STARVED_S / 60:.0f} minutes; {HELD if now.vitals.missing_is_held else NOT_HELD}"
        ),
        is_problem=False,
        progress=lambda now: now.vitals.fetched_bytes,
        after_s=STARVED_S,
    ),
    Check(
        name="clock",
        finds=lambda now, _: clock_problem(now.vitals.clock_offsets),
        is_problem=False,
    ),
    Check(
        name="invitation",
        finds=lambda now, _: (
            (left := runs_out_soon(now.invited_until, now.time))
            and f"{left}; an owner runs: gossamer invite NODE_ID --tell ADDRESS"
        ),
        is_problem=False,
        repeat_s=DAY_S,
    ),
    Check(
        name="slow",
        finds=lambda now, _: (
            SLOW_S < now.vitals.late_s <= LINK_SILENCE_S  # longer: it slept, which the core logs
            and f"this node was busy for {now.vitals.late_s:.1f} s and answered nobody; it has too little CPU"
            " (train with fewer threads), or its disk hangs"
        ),
        is_problem=False,
    ),
)

HELD = (
    "linked nodes hold some, but the path to them is too slow, or drops long packets, as a VPN may: try a"
    " lower MTU on this machine (ip link set dev INTERFACE mtu 1280)"
)
NOT_HELD = "no linked node holds any: start a node that trained before, or another full replica"


def _why_alone(now: NodeStatus) -> str:
    if now.vitals.refusal:
        return f"they no longer let it in: {now.vitals.refusal}"
    swarm = "" if now.vitals.has_model else "it has no model yet: start a node of the swarm; "
    return f"{swarm}check this machine's network, and --join"


def clock_problem(offsets: Iterable[float]) -> str:
    """What is wrong with our clock, judged by how far the clocks of peers are ahead of it; empty if
    nothing."""
    known = list(offsets)
    if not known:
        return ""
    off = min(median_low(known), median_high(known), key=abs)  # half of them, with ours, are a majority
    if abs(off) < CLOCK_OFF_S:
        return ""
    which = "behind" if off > 0 else "ahead of"
    theirs = f"the clock(s) of {len(known)} peer(s)"
    return f"this machine's clock is {abs(off):.0f} s {which} {theirs}; set the one that is wrong (NTP)"


@dataclass(slots=True)
class _Finding:
    """What one check has found so far; times are seconds of a monotonic clock."""

    message: str = ""
    found_at: float = -inf
    since: float | None = None
    """When nothing was wrong last, or there was progress."""
    progress: Any = None
    logged_at: float = -inf
    is_active: bool = False

    def update(self, check: Check, status: NodeStatus, before: NodeStatus, now: float) -> None:
        found, progress = check.finds(status, before), check.progress(status)
        if not found or self.since is None or progress != self.progress:
            self.since, self.progress = now, progress
        if found and now - self.since >= check.after_s:
            self.message, self.found_at = str(found), now
        self.is_active = now - self.found_at <= check.lasts_s
        if self.is_active and now - self.logged_at >= check.repeat_s:
            self.logged_at = now
            log.warning("%s", self.message)


class HealthChecks:
    """Makes all checks, one status after another."""

    def __init__(self) -> None:
        self._findings = {check.name: _Finding() for check in CHECKS}
        self._before: NodeStatus | None = None

    def check(self, status: NodeStatus, now: float) -> None:
        """Judge a status, and log what is new. `now`: seconds of a monotonic clock."""
        for check in CHECKS:
            self._findings[check.name].update(check, status, self._before or status, now)
        self._before = status

    def is_found(self, name: str) -> bool:
        """Whether the check of this name finds something."""
        return self._findings[name].is_active

    @property
    def problem(self) -> str | None:
        """Why the node is not healthy; None if it is."""
        active = (check.name for check in CHECKS if check.is_problem and self.is_found(check.name))
        return next((self._findings[name].message for name in active), None)
