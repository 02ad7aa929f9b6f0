"""What changes in the swarm, for the log: who comes and goes, and whether the replicas agree; and the log's
latest lines, for people who watch a node by other means.

That a member does not answer, or is down, is logged by the code that finds out (see `protocol.membership`).
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf
from typing import NamedTuple, Protocol

from gossamer.node.daemon.monitoring.status import Likeness, NodeStatus
from gossamer.protocol.membership.members import Health, Member, listed

LINES_MAX = 500
TEXT_MAX = 500
"""The most characters of one line."""

log = logging.getLogger("gossamer.node")


class Labelled(Protocol):
    """A member as the roster or a status has it."""

    @property
    def label(self) -> str: ...


class SwarmEvents:
    """Compares each status with the one before."""

    def __init__(self) -> None:
        self._before: Mapping[bytes, tuple[Health, int]] = {}
        """Health and downs of each member, when they were last compared."""
        self._due_at = -inf
        self._differing: Set[str] = set()
        self._agreed_round = 0

    def log(self, status: NodeStatus, members: Sequence[Member], wait_s: float) -> None:
        """Log what has changed since the last status, but who comes and goes only every `wait_s`: in a large
        swarm somebody always does."""
        if status.time >= self._due_at:
            self._due_at = status.time + wait_s
            before, self._before = self._before, {m.record.node_id: (m.health, m.downs) for m in members}
            known = [(m, *before[m.record.node_id]) for m in members if m.record.node_id in before]
            _log("heard of %s", [m for m in members if m.record.node_id not in before and not m.is_gone])
            _log("back again: %s", [m for m, health, downs in known if _is_back(m, health, downs)])
            _log("left: %s", [m for m, health, _ in known if m.health is Health.LEFT is not health])
        self._log_replicas(status)

    def _log_replicas(self, status: NodeStatus) -> None:
        """Log members whose model differs from ours and, once for each of our snapshots, that all live
        members have the same."""
        differing = [m for m in status.members if m.is_live and m.replica == Likeness.OTHER]
        new = [member for member in differing if member.node_id not in self._differing]
        self._differing = {member.node_id for member in differing}
        for round_ in sorted({member.replica_round or 0 for member in new}):
            at_once = [member for member in new if member.replica_round == round_]
            _log(f"the model of %s differs from ours at round {round_}", at_once, logging.ERROR)
        newest = status.sealed_round or 0
        is_shared = status.replicas == {Likeness.SAME: status.live} and set(status.same_at) == {newest}
        if is_shared and newest > self._agreed_round:
            self._agreed_round = newest
            log.info("round %d is sealed: all %d replicas are identical", newest, status.live + 1)


def _is_back(member: Member, health: Health, downs: int) -> bool:
    """Whether a member is alive that was gone at the last look, or has been down since.

    A member that has lost its network dials again just when it is given up, so it is often down only for a
    moment.
    """
    was_live = health in (Health.ALIVE, Health.SUSPECT)
    return member.health is Health.ALIVE and (not was_live or member.downs > downs)


def _log(sentence: str, members: Iterable[Labelled], level: int = logging.INFO) -> None:
    """Log one line for all of them, since anybody may be hundreds of members; nothing if there are none."""
    if names := listed(member.label for member in members):
        log.log(level, sentence, names)


class Line(NamedTuple):
    """One line of the log."""

    number: int
    """Its number among all lines of this process."""
    time: float
    """Unix seconds."""
    level: str
    """"info", "warning" or "error"."""
    text: str

    def to_json(self) -> dict[str, str | float]:
        return {"time": round(self.time, 3), "level": self.level, "text": self.text}


class LogRing(logging.Handler):
    """Keeps the latest lines that any thread logs at `info` and above, to loggers that it is a handler of."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Line] = deque(maxlen=LINES_MAX)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under the handler's lock."""
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        self._count += 1
        self._lines.append(Line(self._count, record.created, record.levelname.lower(), text[:TEXT_MAX]))

    def since(self, number: int) -> list[Line]:
        """All that are kept after line `number`, oldest first."""
        return [line for line in tuple(self._lines) if line.number > number]
