"""The roster: every member's newest record, what we believe of its health, and what we say of ourselves.

Only its author writes a record, and the newest (incarnation, heartbeat) wins, so the roster is a set that
gossip can unite like the ledger. Health is each node's own judgement (see `swim`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.identity import short
from gossamer.protocol.records import MemberRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node says of itself, and what it was given at its start."""

    name: str
    trains: bool
    incarnation: int
    bootstrap: tuple[str, ...] = ()
    pins: Mapping[str, bytes] = field(default_factory=dict)
    """The node id that must answer at a bootstrap address, for addresses where it is known."""
    remembered: frozenset[str] = frozenset()
    """Bootstrap addresses that we were not given at this start: members met in earlier runs."""
    trusted: frozenset[bytes] = frozenset()
    """Node ids whose claimed snapshot is enough to start from, if the user has named any."""
    fingerprint: bytes = b""
    """SHA-256 of our TLS certificate, empty without TLS."""
    version: str = ""


@dataclass(slots=True)
class Activity:
    """How far a node is, and when it last moved; times are the local clock's, seconds.

    A live node need not be training: its script may evaluate, have finished or hang, or its machine sleep.
    Records state inner steps and rounds. A node counts as idle once they have not changed for three times as
    long as the change before took.
    """

    moved: float
    """When it last moved; at first, when it was first heard of. If -inf, it is idle until it moves."""
    at: tuple[int, int] = (0, 0)
    """Its inner steps, and its round."""
    stride_s: float = 0.0
    """How long the last move took; 0 before the first."""
    delay_s: float = 0.0
    """How much later than in a small swarm we hear of a move, see `Roster.delay_s`."""

    def note(self, inner_steps: int, round_: int, now: float, *, was_away: bool = False) -> None:
        """Take in how far the node says it is. If it `was_away` (not heard of), the stride is unknown."""
        if (inner_steps, round_) != self.at:
            self.at = inner_steps, round_
            if not was_away and self.moved > -inf:
                self.stride_s = min(now - self.moved, limits.STRIDE_MAX_S)
            self.moved = now

    def is_idle(self, now: float) -> bool:
        """Whether the node seems not to train."""
        least = limits.IDLE_MIN_S + limits.IDLE_STRIDES * self.delay_s
        return now - self.moved > max(least, limits.IDLE_STRIDES * self.stride_s)


NAMES_MAX = 6
"""The most names in one message."""


class Health(StrEnum):
    """What we believe of a member."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DOWN = "down"
    LEFT = "left"


_EVERY = frozenset(Health)
_LIVE = frozenset({Health.ALIVE, Health.SUSPECT})
_DOUBTED = _EVERY - {Health.ALIVE}
_MISSING = frozenset({Health.SUSPECT, Health.DOWN})


@dataclass(slots=True)
class Member:
    """A record and our judgement of it; times are the local clock's, seconds."""

    record: MemberRecord
    health: Health
    since: float
    """When its health last changed."""
    heard: float
    """When there was last a sign of life: a newer record, or an answer on a link."""
    answered: float = -inf
    """When it last spoke on a link to us. A record may have been on its way for seconds; this has not."""
    received_at: float = -inf
    """When its newest record came."""
    activity: Activity = field(default_factory=lambda: Activity(-inf))
    downs: int = 0
    """How often it was found to be down. A count, since it may be back before anybody looks."""

    @property
    def label(self) -> str:
        """How it is called in messages to people: its name, if it has one, and the beginning of its id."""
        name, node_id = self.record.body.name, short(self.record.node_id)
        return f"{name} ({node_id})" if name else node_id

    @property
    def is_gone(self) -> bool:
        """Whether it has left, or is down."""
        return self.health not in _LIVE

    @property
    def is_missing(self) -> bool:
        """Whether it is down or suspected: gone, or seemingly so, without having said so."""
        return self.health in _MISSING


def listed(labels: Iterable[str]) -> str:
    """Members in messages to people: ``X``, ``X and Y``, or at most `NAMES_MAX` names; empty if none."""
    names = list(labels)
    if len(names) > NAMES_MAX:
        names = [*names[: NAMES_MAX - 1], f"{len(names) - NAMES_MAX + 1} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def _delay_s(others: int) -> float:
    """By how much longer than HEARTBEAT_INTERVAL_S records last in a swarm of us and so many others."""
    return max(0.0, (1 + others) * limits.HEARTBEAT_PER_MEMBER_S - limits.HEARTBEAT_INTERVAL_S)


class Roster:
    """All known members except ourselves."""

    def __init__(self, own_id: bytes) -> None:
        self._own_id = own_id
        self._members: dict[bytes, Member] = {}
        self._views: dict[frozenset[Health], list[Member]] = {}
        """Cached lists of members by health, in order of node id, until a member comes, goes or changes."""
        self._author_of: dict[bytes, bytes] = {}
        """Author by the bytes of the record's envelope, for the newest record of every author."""

    def update(self, record: MemberRecord, now: float) -> bool:
        """Take in a record if it is newer than the one we have. Returns whether it was."""
        if record.node_id == self._own_id:
            return False
        known = self._members.get(record.node_id)
        if known is not None and record.body.age <= known.record.body.age:
            return False
        if known is None:
            if len(self._members) >= limits.MEMBERS_MAX and not self._make_room():
                return False
            self._members[record.node_id] = known = Member(
                record, Health.ALIVE, now, now, activity=Activity(now)
            )
            self._views.clear()
        self._author_of.pop(known.record.data, None)
        self._author_of[record.data] = record.node_id
        delay = known.activity.delay_s = self.delay_s
        was_away = now - known.received_at > limits.IDLE_MIN_S + limits.IDLE_STRIDES * delay
        known.record = record
        known.heard = known.received_at = now
        known.activity.note(record.body.inner_steps, record.body.round, now, was_away=was_away)
        self.judge(record.node_id, Health.LEFT if record.body.leaving else Health.ALIVE, now)
        return True

    @property
    def interval_s(self) -> float:
        """How often a member renews its record: the more members live, the more rarely."""
        return limits.HEARTBEAT_INTERVAL_S + _delay_s(len(self.live()))

    @property
    def delay_s(self) -> float:
        """By how much later than in a small swarm a member's next record may come.

        Members that are gone count: the others renew their records sooner only when they know of that.
        """
        return _delay_s(len(self._members))

    def judge(self, node_id: bytes, health: Health, now: float) -> None:
        """Change what we believe of a member."""
        member = self._members[node_id]
        if member.health is not health:
            member.health = health
            member.since = now
            member.downs += health is Health.DOWN
            self._views.clear()

    def heard_from(self, node_id: bytes, at: float) -> None:
        """Note a sign of life other than a record. It lifts a suspicion unless that is younger."""
        member = self._members.get(node_id)
        if member is not None and member.health is not Health.LEFT:
            member.heard = max(member.heard, at)
            member.answered = max(member.answered, at)
            if at >= member.since:
                self.judge(node_id, Health.ALIVE, at)

    def forget_old(self, now: float) -> None:
        """Drop members that have been gone for `FORGET_DOWN_AFTER_S` (a day)."""
        for member in self.doubted():
            if member.is_gone and now - member.since > limits.FORGET_DOWN_AFTER_S:
                self.remove(member.record.node_id)

    def remove(self, node_id: bytes) -> None:
        """Drop a node at once, whatever its health: it is no longer a member."""
        member = self._members.pop(node_id, None)
        if member is not None:
            self._author_of.pop(member.record.data, None)
            self._views.clear()

    def _make_room(self) -> bool:
        gone = [member for member in self.doubted() if member.is_gone]
        if gone:
            self.remove(min(gone, key=lambda member: member.since).record.node_id)
        return bool(gone)

    def whose(self, record: bytes) -> bytes | None:
        """The author whose newest record these bytes are, if any: known records are not parsed again."""
        return self._author_of.get(record)

    def get(self, node_id: bytes) -> Member | None:
        return self._members.get(node_id)

    def label(self, node_id: bytes) -> str:
        """How a node, member or not, is called in messages to people."""
        member = self._members.get(node_id)
        return short(node_id) if member is None else member.label

    def members(self) -> list[Member]:
        """All members in order of node id."""
        return self._view(_EVERY)

    def live(self) -> list[Member]:
        """Members not known to be gone. A mere suspicion changes nothing for training."""
        return self._view(_LIVE)

    def doubted(self) -> list[Member]:
        """Members that are not believed alive."""
        return self._view(_DOUBTED)

    def _view(self, healths: frozenset[Health]) -> list[Member]:
        """Cached, since it is read far more often than it changes. A change makes a new list and leaves the
        old one untouched."""
        view = self._views.get(healths)
        if view is None:
            ordered = [self._members[node_id] for node_id in sorted(self._members)]
            view = self._views[healths] = [member for member in ordered if member.health in healths]
        return view
