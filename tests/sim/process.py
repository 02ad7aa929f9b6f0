"""A process on a host: it can be stopped and go on, die and be started again.

Everything that reaches a process goes through `deliver`, which holds it back while the process is stopped
and drops it once that life is over.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from tests.sim.loop import Loop

SLOW_S = 3.0
"""An event loop that stands still for so long is slow; whoever stands for longer is away."""


class Process:
    """One process, over all its lives."""

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
        """When it last went on after it had been away."""
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def begin_life(self) -> None:
        """Start; whatever waited for an earlier life is void."""
        self.life += 1
        self.powered = self.running = self.responsive = True
        self.started_at = self._loop.now
        self._backlog.clear()

    def end_life(self) -> None:
        self.running = self.responsive = False
        self._backlog.clear()

    def stop(self) -> None:
        """Like SIGSTOP, or a laptop's lid, or an event loop that is busy elsewhere."""
        if self.responsive:
            self._stopped_at = self._loop.now
        self.responsive = False
        self.disturbed_at = self._loop.now

    def resume(self) -> None:
        """Like SIGCONT: all that has waited comes at once."""
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
        """Since when it has been there, slow at times maybe; inf if it is not there now."""
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
