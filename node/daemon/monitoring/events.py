"""Logs what changes in the swarm: who comes and goes, and whether the replicas agree.

That a member does not answer, or is down, is logged by the code that finds out (see `protocol.membership`).
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence, Set
from enum import StrEnum
from typing import Any, NamedTuple

from gossamer.node.daemon.monitoring.status import LIVE
from gossamer.protocol.claims import Claim
from gossamer.protocol.membership.members import Health, Member, listed

# --- Whether the others hold the same model as this node, as far as their claims and ours can tell.
#
# Snapshots of a round do not appear everywhere at once, and a node that lags behind has older ones. So each
# replica is compared with ours at the newest round of which both have a snapshot.


class Likeness(StrEnum):
    """How another's replica compares with ours at one round."""

    SAME = "same"
    RECORDS = "records"
    """The node has merged other records up to that round: a late record has so far reached only one of us."""

    OTHER = "other"
    """The node claims to have merged the same records, and holds a different model."""


class Comparison(NamedTuple):
    """How two replicas compare at the newest round of which both have a snapshot."""

    round: int
    likeness: Likeness


def compare(ours: Iterable[Claim], theirs: Iterable[Claim]) -> Comparison | None:
    """Compare our replica with another; None if there is no round of which both have a snapshot."""
    own_at = {claim.round: claim for claim in ours}
    other = max((claim for claim in theirs if claim.round in own_at), default=None)
    if other is None:
        return None
    own = own_at[other.round]
    if own.digest != other.digest:
        return Comparison(other.round, Likeness.RECORDS)
    return Comparison(other.round, Likeness.SAME if own.root == other.root else Likeness.OTHER)


def summary(ours: Iterable[Claim], found: Iterable[Comparison | None]) -> dict[str, Any]:
    """The comparisons with all others in sum: ``{"same", "of", "rounds", "digest"}``.

    `same` is how many hold the same model, `of` how many could be compared, `rounds` the oldest and the
    newest round at which they were, and `digest` the root of our snapshot of the newest. The last two are
    None if none could be compared.
    """
    compared = [comparison for comparison in found if comparison is not None]
    rounds = [comparison.round for comparison in compared]
    newest = max(rounds, default=None)
    return {
        "same": sum(comparison.likeness is Likeness.SAME for comparison in compared),
        "of": len(compared),
        "rounds": [min(rounds), newest] if rounds else None,
        "digest": next((claim.root.hex() for claim in ours if claim.round == newest), None),
    }


# --- The latest log lines, for people who watch a node by other means than its log.

NOTICES_MAX = 500
TEXT_MAX = 500
"""The most characters of one notice."""

_LOGGER = logging.getLogger("gossamer")


class Notice(NamedTuple):
    """One line of the log."""

    number: int
    """Its number among all notices of this process."""
    time: float
    """Unix seconds."""
    level: str
    """"info", "warning" or "error"."""
    text: str

    def to_json(self) -> dict[str, str | float]:
        return {"time": round(self.time, 3), "level": self.level, "text": self.text}


class Notices(logging.Handler):
    """Keeps what is logged at `info` and above. Lines may come from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[Notice] = deque(maxlen=NOTICES_MAX)
        self.count = 0

    def begin(self) -> None:
        """Listen to the log of this process."""
        _LOGGER.addHandler(self)

    def end(self) -> None:
        _LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under the handler's lock."""
        level = (
            "info"
            if record.levelno < logging.WARNING
            else "warning"
            if record.levelno < logging.ERROR
            else "error"
        )
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        self.count += 1
        self._kept.append(Notice(self.count, record.created, level, text[:TEXT_MAX]))

    def since(self, number: int) -> list[Notice]:
        """All that are kept after notice `number`, oldest first."""
        self.acquire()
        try:
            return [notice for notice in self._kept if notice.number > number]
        finally:
            self.release()


log = logging.getLogger("gossamer.node")


class Happenings:
    """Compares each look at the swarm with the one before."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[Health, int]] = {}
        """Each member's health at the last look, and how often it had been down by then."""
        self._told_round = 0
        self._differing: Set[bytes] = set()

    def look(self, members: Sequence[Member], claims: tuple[Claim, ...]) -> None:
        """Log what has changed since the last look; `claims` are ours."""
        self._say_who_came_and_went(members)
        self._say_who_differs(members, claims)

    def _say_who_came_and_went(self, members: Sequence[Member]) -> None:
        before = self._seen
        self._seen = {member.record.node_id: (member.health, member.downs) for member in members}
        known = [member for member in members if member.record.node_id in before]
        _say("heard of %s", [m for m in members if m.record.node_id not in before and m.health in LIVE])
        _say("back again: %s", [m for m in known if _is_back(m, *before[m.record.node_id])])
        _say("left: %s", [m for m in known if m.health is Health.LEFT is not before[m.record.node_id][0]])

    def _say_who_differs(self, members: Sequence[Member], claims: tuple[Claim, ...]) -> None:
        """Log members whose model differs from ours and, once for each of our snapshots, that all live
        members have the same."""
        live = [member for member in members if member.health in LIVE]
        found = {member.record.node_id: compare(claims, member.record.body.claims) for member in live}
        differing = {
            id_: pair.round for id_, pair in found.items() if pair and pair.likeness is Likeness.OTHER
        }
        new = [member for member in live if member.record.node_id in differing.keys() - self._differing]
        for round_ in sorted({differing[member.record.node_id] for member in new}):
            at_once = [member for member in new if differing[member.record.node_id] == round_]
            _say(f"the model of %s differs from ours at round {round_}", at_once, logging.ERROR)
        self._differing = differing.keys()
        newest = claims[0].round if claims else 0
        is_shared = bool(found) and all(pair == (newest, Likeness.SAME) for pair in found.values())
        if is_shared and newest > self._told_round:
            self._told_round = newest
            log.info("round %d is sealed: all %d replicas are identical", newest, len(found) + 1)


def _is_back(member: Member, health: Health, downs: int) -> bool:
    """Whether a member is alive that was gone at the last look, or has been down since.

    A member that has lost its network dials again just when it is given up, so it is often down only for a
    moment.
    """
    return member.health is Health.ALIVE and (health not in LIVE or member.downs > downs)


def _say(sentence: str, members: Iterable[Member], level: int = logging.INFO) -> None:
    """Log one line for all of them, since anybody may be hundreds of members; nothing if there are none."""
    if names := listed(member.label for member in members):
        log.log(level, sentence, names)
