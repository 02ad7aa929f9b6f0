"""How the node itself is doing: a table of checks over its status, which are made once a second.

To add a check, add a row to `CHECKS`. What a check finds is logged when it begins, and again only after
minutes: a node's owner should be told, but not be flooded. A check with severity PROBLEM also makes the node
unhealthy: ``/healthz`` answers 503 with the first problem in the order of the table.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from statistics import median_high, median_low
from typing import Any

from gossamer.node.daemon.monitoring.status import NodeStatus
from gossamer.node.home import runs_out_soon
from gossamer.node.logs import REPEAT_S
from gossamer.protocol.limits import SLEEP_MIN_S

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

OUTDONE_MAX = 2
"""After a clock was set back, our member records of before are newer than ours now, once or twice."""

ALONE_S = 30.0
REACH_S = 600.0
"""By then, a node that can be dialled usually has been: each newcomer looks for six links."""

MEMBERS_MIN = 2
"""With fewer other members up, it means nothing that nobody has dialled us."""

STARVED_S = 300.0

SLOW_S = 1.0
CLOCK_OFF_S = 30.0
PEERS_MIN = 3
"""With fewer peers it cannot be told whose clock is wrong."""

log = logging.getLogger("gossamer.health")


class Severity(Enum):
    """What follows from a finding, besides a line in the log."""

    PROBLEM = "the node is unhealthy"
    WARNING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    severity: Severity
    when: Callable[[NodeStatus, NodeStatus], object]
    """Whether something is wrong, by the status now and the one before."""
    message: Callable[[NodeStatus], str]
    """What is wrong."""
    advice: str | Callable[[NodeStatus], str] = ""
    """What to do, added to the log line."""
    after_s: float = 0.0
    """How long `when` must have held without a break."""
    progress: Callable[[NodeStatus], Any] = lambda now: None
    """While this changes, `after_s` starts over."""
    lasts_s: float = 0.0
    """For how long a finding stays one after `when` has last held."""
    repeat_s: float = REPEAT_S
    """How long it is not logged again."""
    over: str = ""
    """Logged once it is over; what comes after is logged anew."""
    is_logged: bool = True
    """False if the code that finds it logs it."""


CHECKS = (
    Check(
        name="space",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.disk_free < DISK_FREE_MIN or now.files_free < FILES_FREE_MIN,
        message=lambda now: f"the disk is full: {now.disk_free >> 20} MiB, {now.files_free} files are free",
        advice="publishing and fetching pause when nothing is left",
    ),
    Check(
        name="disk",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.disk_problem,
        message=lambda now: now.disk_problem,
        is_logged=False,
    ),
    Check(
        name="refused",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.refusal and not now.links,  # whoever is linked may have a slower clock
        message=lambda now: now.refusal,
    ),
    Check(
        name="diverged",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.diverged,
        message=lambda now: f"the model diverged: {now.diverged}",
        advice="nothing is published until an owner revokes the member that caused it (gossamer revoke); or"
        " start a new swarm from what gossamer export --sealed writes",
    ),
    Check(
        name="early",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.clock_contradicted,
        message=lambda _: (
            "by this machine's clock, it is too early for the round that the other nodes are at"
        ),
        advice="what they publish is refused: set it (NTP), unless theirs was wrong when the swarm was made",
    ),
    Check(
        name="merging",
        severity=Severity.PROBLEM,
        # Nothing can be merged before the model is here, which may take hours on a slow line.
        when=lambda now, _: now.rounds_behind and now.has_model,
        progress=lambda now: now.version,
        after_s=STUCK_S,
        message=lambda now: (
            f"merging is stuck: {now.rounds_behind} rounds are waiting, and none was merged for"
            f" {STUCK_S:.0f} s"
        ),
        advice="restart the node, and report this with its log",
    ),
    Check(
        name="no trainer",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.trains and not now.has_trainer,
        after_s=TRAINER_S,
        message=lambda _: f"there has been no trainer for {TRAINER_S:.0f} s",
        advice="start it again; its own log says why it ended",
    ),
    Check(
        name="trainer ends",
        severity=Severity.PROBLEM,
        when=lambda now, before: now.trainer_starts > max(before.trainer_starts, STARTS_FREE),
        lasts_s=TRAINER_S,
        message=lambda now: f"the trainer has been started {now.trainer_starts} times, and just now again",
        advice="if it keeps ending, its own log says why",
    ),
    Check(
        name="standstill",
        severity=Severity.PROBLEM,
        when=lambda now, _: now.step_overdue_s > STANDSTILL_S,
        message=lambda _: (
            f"the trainer has not taken a step for {STANDSTILL_S / 60:.0f} minutes: is it stuck?"
        ),
        repeat_s=HOUR_S,  # a notebook may rest for long, again and again
    ),
    Check(
        name="key",
        severity=Severity.PROBLEM,
        when=lambda now, before: (
            now.own_void > before.own_void
            or now.newer_own_records > max(before.newer_own_records, OUTDONE_MAX)
        ),
        lasts_s=KEY_S,
        message=lambda _: (
            "this node's key signs elsewhere, in a copy of its folder, or did so before an old copy was"
            " restored: what it publishes is void"
        ),
        advice="stop all but one; to make a copy a node of its own, remove the file key from it",
    ),
    Check(
        name="alone",
        severity=Severity.WARNING,
        when=lambda now, _: now.known_addresses and not now.links,  # a founder that waits dials nobody
        after_s=ALONE_S,
        message=lambda now: (
            f"alone: no link for {ALONE_S:.0f} s, though this node dials {now.known_addresses} known"
            " address(es)"
        ),
        advice=lambda now: (
            f"they no longer let it in: {now.refusal}"
            if now.refusal
            else "check this machine's network, and --join"
            if now.has_model
            else "it has no model yet: start a node of the swarm; check this machine's network, and --join"
        ),
        repeat_s=HOUR_S,
        over="linked to others again",
    ),
    Check(
        name="undialled",
        severity=Severity.WARNING,
        when=lambda now, _: now.addresses and now.links and now.live >= MEMBERS_MIN and not now.reachable,
        progress=lambda now: now.addresses,
        after_s=REACH_S,
        message=lambda now: (
            f"nobody has dialled this node at {', '.join(now.addresses)} within {REACH_S / 60:.0f} minutes"
        ),
        advice="if a firewall or NAT is in the way, open or forward that port, or set --advertise"
        " HOST:PORT. The node trains all the same: it dials others",
        repeat_s=DAY_S,
    ),
    Check(
        name="starved",
        severity=Severity.WARNING,
        # Later, what is missing may be gone with its author for good.
        when=lambda now, _: now.payloads_missing and now.links and not now.is_ready,
        progress=lambda now: now.fetched_bytes,
        after_s=STARVED_S,
        message=lambda now: (
            f"joining: no part of {now.payloads_missing} missing payloads or snapshots has arrived for"
            f" {STARVED_S / 60:.0f} minutes"
        ),
        advice=lambda now: (
            "linked nodes hold some, but the path to them is too slow, or drops long packets, as a VPN may:"
            " try a lower MTU on this machine (ip link set dev INTERFACE mtu 1280)"
            if now.missing_is_held
            else "no linked node holds any: start a node that trained before, or another full replica"
        ),
    ),
    Check(
        name="clock",
        severity=Severity.WARNING,
        when=lambda now, _: clock_problem(now.clock_offsets),
        message=lambda now: clock_problem(now.clock_offsets),
        advice="set it (NTP)",
    ),
    Check(
        name="invitation",
        severity=Severity.WARNING,
        when=lambda now, _: runs_out_soon(now.invited_until, now.time),
        message=lambda now: runs_out_soon(now.invited_until, now.time) or "",
        advice="an owner runs: gossamer invite NODE_ID --tell ADDRESS",
        repeat_s=DAY_S,
    ),
    Check(
        name="slow",
        severity=Severity.WARNING,
        when=lambda now, _: SLOW_S < now.late_s <= SLEEP_MIN_S,  # longer: it slept, which the core logs
        message=lambda now: f"this node was busy for {now.late_s:.1f} s and answered nobody",
        advice="it has too little CPU (train with fewer threads), or its disk hangs",
    ),
)


def clock_problem(offsets: Iterable[float]) -> str:
    """What is wrong with our clock, judged by how far the clocks of peers are ahead of it; empty if
    nothing."""
    known = list(offsets)
    if not known:
        return ""
    off = min(median_low(known), median_high(known), key=abs)  # half of them, with ours, are a majority
    if abs(off) < CLOCK_OFF_S:
        return ""
    if len(known) < PEERS_MIN:
        theirs = f"that of {len(known)} peer(s)"
        return f"this machine's clock and {theirs} differ by {abs(off):.0f} s, and one is wrong"
    which = "behind" if off > 0 else "ahead of"
    return f"this machine's clock is {abs(off):.0f} s {which} the clocks of {len(known)} peers"


@dataclass(slots=True)
class _Finding:
    """What one check has found so far; times are seconds of a monotonic clock."""

    message: str = ""
    found_at: float = -inf
    since: float | None = None
    """When `when` last did not hold, or there was progress."""
    progress: Any = None
    logged_at: float = -inf
    is_active: bool = False

    def update(self, check: Check, status: NodeStatus, before: NodeStatus, now: float) -> None:
        was_active, progress = self.is_active, check.progress(status)
        holds = check.when(status, before)
        if not holds or self.since is None or progress != self.progress:
            self.since, self.progress = now, progress
        if holds and now - self.since >= check.after_s:
            self.message, self.found_at = check.message(status), now
        self.is_active = now - self.found_at <= check.lasts_s
        if self.is_active and check.is_logged and now - self.logged_at >= check.repeat_s:
            self.logged_at = now
            advice = check.advice if isinstance(check.advice, str) else check.advice(status)
            log.warning("%s", "; ".join(filter(None, (self.message, advice))))
        if was_active and not self.is_active and check.over:
            self.logged_at = -inf
            log.info("%s", check.over)


class HealthChecks:
    """Makes all checks, one status after another."""

    def __init__(self) -> None:
        self._findings = {check.name: _Finding() for check in CHECKS}
        self._before: NodeStatus | None = None

    def check(self, status: NodeStatus, now: float | None = None) -> None:
        """Judge a status, and log what is new. `now` is for tests."""
        now = time.monotonic() if now is None else now
        for check in CHECKS:
            self._findings[check.name].update(check, status, self._before or status, now)
        self._before = status

    def is_found(self, name: str) -> bool:
        """Whether the check of this name finds something."""
        return self._findings[name].is_active

    @property
    def problem(self) -> str | None:
        """Why the node is not healthy; None if it is."""
        active = (c for c in CHECKS if c.severity is Severity.PROBLEM and self._findings[c.name].is_active)
        return next((self._findings[check.name].message for check in active), None)
