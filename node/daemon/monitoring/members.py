"""What is shown of the members: all of them in figures, and each of those listed.

Of a thousand members nobody reads a list once a second, nor could the event loop make one: it takes 15 us a
member. So those that matter most come first (`Rank`), and a status lists no more than `LISTED`.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from statistics import median_low

from gossamer.node.daemon.monitoring.status import LIVE, Likeness, MemberStatus, compare
from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.protocol.access.acl import Role
from gossamer.protocol.membership.members import Health, Member
from gossamer.protocol.records import MemberRecordBody
from gossamer.protocol.replica import Replica

LISTED = 64
LISTED_MAX = 256
"""The most members in one answer, for those who ask for more: 4 ms of the event loop's time."""

LOOKS_PER_DELAY = 8
"""With 1,024 members, each of whom says something new every 72 s, all are looked at every 9 s."""

JUST_DOWN_S = 600.0
SLOW_SHARE = 0.25
"""A member slower than this share of the member in the middle is slow."""


class Rank(IntEnum):
    """Why a member is listed before others; by name within a rank."""

    TROUBLE = 0
    """Its deltas are usually bad, or its model differs."""
    MISSING = 1
    """It does not answer, or is down since a few minutes."""
    LAGGING = 2
    """It is slow, or stands still."""
    LINKED = 3
    LIVE = 4
    GONE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All members but ourselves."""

    by_health: Mapping[str, int]
    replicas: Mapping[str, int]
    same_at: tuple[int, int]
    """As in `NodeStatus`."""
    accused: int
    tokens_per_s: float
    addresses: frozenset[str]
    """Where members can be dialled that have not left."""
    order: tuple[bytes, ...]
    """Their ids, those that matter most first."""


class Members:
    """Looks at the roster, as a whole now and then, and at single members."""

    def __init__(self, core: Replica, loop: MergeLoop) -> None:
        self._core = core
        self._contributions = loop.contributions
        self._survey: Survey | None = None
        self._due_at = -inf

    def survey(self, linked: Collection[bytes]) -> Survey:
        """All members, as of now or, in a large swarm, some seconds ago."""
        now = time.monotonic()
        if self._survey is None or now >= self._due_at:
            self._due_at = now + self._core.roster.delay_s / LOOKS_PER_DELAY
            self._survey = self._look(linked, now)
        return self._survey

    def _look(self, linked: Collection[bytes], now: float) -> Survey:
        members, claims = self._core.roster.members(), self._core.sealing.claims
        speeds = [m.record.body.tokens_per_s for m in members if m.record.body.trains and not m.is_gone]
        slow = SLOW_SHARE * median_low(speeds or [0.0])
        replicas: Counter[str] = Counter()
        same_at, accused = [], 0
        ranked = []
        for member in members:
            node_id, body = member.record.node_id, member.record.body
            likeness, round_ = compare(claims, body.claims) if not member.is_gone else (None, None)
            if not member.is_gone:
                replicas[likeness or "unknown"] += 1
            if likeness is Likeness.SAME and round_ is not None:
                same_at.append(round_)
            is_accused = self._contributions.of(node_id).verdict is not None
            accused += is_accused
            if is_accused or likeness is Likeness.OTHER:
                rank = Rank.TROUBLE
            elif member.health is Health.SUSPECT or (
                member.health is Health.DOWN and now - member.since < JUST_DOWN_S
            ):
                rank = Rank.MISSING
            elif member.is_gone:
                rank = Rank.GONE
            elif body.trains and (body.tokens_per_s < slow or member.activity.is_idle(now)):
                rank = Rank.LAGGING
            else:
                rank = Rank.LINKED if node_id in linked else Rank.LIVE
            ranked.append((rank, body.name, node_id))
        by_rank = [node_id for _, _, node_id in sorted(ranked)]
        head = by_rank[: LISTED // 2]  # when hundreds are down, one still sees whom we are linked to
        dialled = (member for member in members if member.health is not Health.LEFT)
        return Survey(
            by_health=Counter(member.health for member in members),
            replicas=replicas,
            same_at=(min(same_at, default=0), max(same_at, default=0)),
            accused=accused,
            tokens_per_s=sum(speeds),
            addresses=frozenset(address for m in dialled for address in m.record.body.addresses),
            order=tuple(dict.fromkeys([*head, *(one for one in by_rank if one in linked), *by_rank])),
        )

    def listed(self, order: tuple[bytes, ...]) -> tuple[MemberStatus, ...]:
        """Those of these members that are still known."""
        found = ((node_id, self._core.roster.get(node_id)) for node_id in order)
        return tuple(self.status(node_id, m.record.body, m) for node_id, m in found if m is not None)

    def status(self, node_id: bytes, body: MemberRecordBody, member: Member | None) -> MemberStatus:
        """A member or, if there is none, this node."""
        core = self._core
        claims = body.claims if member is not None and member.health in LIVE else ()
        replica, replica_round = compare(core.sealing.claims, claims)
        may_train = core.acl.role_of(node_id) is Role.TRAIN
        latest = core.ledger.get(core.ledger.last_record(node_id))
        took = latest.body.took if latest else 0
        return MemberStatus(
            node_id=node_id.hex(),
            name=body.name,
            health=member.health if member else Health.ALIVE,
            trains=body.trains,
            role="train" if body.trains and may_train else "observe",
            round=max(body.round, core.ledger.last_round(node_id)),
            tokens=body.tokens,
            tokens_per_s=0.0 if member and member.is_gone else body.tokens_per_s,
            loss=body.loss or None,
            fresh=round(1 - latest.body.late / took, 3) if latest and took else None,
            codec=latest.body.codec if latest else None,
            device=body.device,
            release=body.version,
            addresses=tuple(body.addresses),
            dialled=tuple(prefix.hex() for prefix in body.dialled),
            heard_s=round(max(0.0, time.monotonic() - member.heard), 1) if member else 0.0,
            downs=member.downs if member else 0,
            replica=replica,
            replica_round=replica_round,
            contributions=self._contributions.of(node_id)._asdict(),
        )
