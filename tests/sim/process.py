"""A process on a host: it can be stopped and go on, die and be started again.

All calls to a process go through `deliver`, which holds them back while the process is stopped, and drops
them once that life of the process is over.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from tests.sim.loop import Loop

SLOW_S = 3.0
"""A process that stands still for up to this long is slow; one that stands still for longer is away."""


class Process:
    """One process, over all its lives: each start begins a new one."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.powered = True
        """Whether its host runs at all."""
        self.running = False
        self.responsive = False
        """Whether it runs and is not stopped."""
        self.life = 0
        self.started_at = 0.0
        self.disturbed_at = -1e9
        """When it was last stopped or starved."""
        self._stopped_at = 0.0
        self._came_back_at = -1e9
        """When it last went on after having been away."""
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def begin_life(self) -> None:
        """Start; calls that waited for an earlier life are dropped."""
        self.life += 1
        self.powered = self.running = self.responsive = True
        self.started_at = self._loop.now
        self._backlog.clear()

    def end_life(self) -> None:
        self.running = self.responsive = False
        self._backlog.clear()

    def stop(self) -> None:
        """Stop, as by SIGSTOP, a laptop's lid, or an event loop that is busy elsewhere."""
        if self.responsive:
            self._stopped_at = self._loop.now
        self.responsive = False
        self.disturbed_at = self._loop.now

    def resume(self) -> None:
        """Go on, as by SIGCONT: all calls that have waited come at once."""
        if self._is_away():
            self._came_back_at = self._loop.now
        self.responsive = self.running
        self.disturbed_at = self._loop.now
        while self._backlog and self.responsive:
            action, args = self._backlog.popleft()
            action(*args)

    def _is_away(self) -> bool:
        return not self.responsive and self._loop.now - self._stopped_at > SLOW_S

    @property
    def present_since(self) -> float:
        """Since when it has been present, if slow at times; infinite if it is not present now."""
        if not self.running or self._is_away():
            return inf
        return max(self.started_at, self._came_back_at)

    def deliver(self, life: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in this life of the process: now, or when it runs again."""
        if life != self.life or not self.running:
            return
        if self.responsive:
            action(*args)
        else:
            self._backlog.append((action, args))

    def soon(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Do something in this life of the process, after a delay."""
        self._loop.after(delay, self.deliver, self.life, action, *args)
