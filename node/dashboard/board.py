"""What `gossamer top` has heard of a node, and of its swarm."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

ROUNDS_SHOWN = 400
ROUNDS_KEPT = 2 * ROUNDS_SHOWN
NOTICES_KEPT = 100


@dataclass(slots=True)
class Board:
    """All that has been heard of a node."""

    address: str
    state: dict[str, Any] | None = None
    losses: dict[int, float] = field(default_factory=dict)
    notices: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NOTICES_KEPT))
    problem: str = ""
    """Why nothing new comes; empty if it does."""

    def take(self, name: str, data: dict[str, Any]) -> None:
        """Take in one event of the admin server."""
        if name == "state":
            if self.state is not None and _which(self.state) != _which(data):
                self.losses.clear()  # another node has this address now
            self.state, self.problem = data, ""
        elif name == "rounds":
            self.losses.update({row[0]: row[2] for row in data["rounds"] if row[2] is not None})
            for round_ in sorted(self.losses)[:-ROUNDS_KEPT]:
                del self.losses[round_]
        elif name == "notice":
            self.notices.append(data)

    def curve(self) -> list[float]:
        """Losses of the latest rounds. Rounds that the swarm has not reached are left out for now."""
        assert self.state is not None
        rounds = [round_ for round_ in sorted(self.losses) if round_ <= self.state["now"]["clock"] + 1]
        return [self.losses[round_] for round_ in rounds[-ROUNDS_SHOWN:]]

    def forget(self, problem: str) -> None:
        """Drop what has been heard, which cannot be shown, and show a problem instead."""
        self.state, self.problem = None, problem
        self.losses.clear()
        self.notices.clear()

    def copy(self) -> "Board":
        """The board as it is now, to be shown while it goes on changing."""
        return Board(
            self.address, self.state, dict(self.losses), deque(self.notices, NOTICES_KEPT), self.problem
        )


def _which(state: dict[str, Any]) -> tuple[str, str]:
    """Which swarm and node a state is of."""
    return state["swarm"]["id"], state["node"]["id"]
