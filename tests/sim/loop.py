"""Virtual time: a queue of actions, carried out in order of time and then of insertion.

Nothing else in the simulator knows what time it is, so ten minutes of a swarm take only as long as the work
in them.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Loop:
    """A discrete-event queue. Times are seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._numbers = 0

    def at(self, time: float, action: Action, *args: Any) -> None:
        """Do something at a time; at once if that time has passed."""
        self._numbers += 1
        heappush(self._queue, (time if time > self.now else self.now, self._numbers, action, args))

    def after(self, delay: float, action: Action, *args: Any) -> None:
        """Do something after a delay."""
        self.at(self.now + delay, action, *args)

    def run(self, until: float) -> None:
        """Carry out everything that is due up to and including `until`."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, action, args = heappop(queue)
            self.events += 1
            action(*args)
        self.now = until
