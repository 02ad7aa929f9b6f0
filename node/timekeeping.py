"""Wakes the core when it asked to be woken, and tells it when the system clock was set."""

import asyncio
import logging
import time
from collections.abc import Callable

from gossamer.protocol import events as ev
from gossamer.protocol.core.replica import Replica

CLOCK_MOVED_S = 2.0
"""Smaller changes are ignored: time servers correct the clock gradually."""

log = logging.getLogger("gossamer.node")


def unix_offset_s() -> float:
    """Unix time minus the monotonic clock, in seconds."""
    return time.time() - time.monotonic()


class Timekeeper:
    """The core's timer."""

    def __init__(self, core: Replica, dispatch: Callable[[ev.Event], object]) -> None:
        self._core = core
        self._dispatch = dispatch
        self._unix_offset_s = unix_offset_s()
        self._moved = asyncio.Event()

    def look(self) -> None:
        """Look at the core's wake time again: it may have changed."""
        self._moved.set()

    async def run(self) -> None:
        """Keep time until cancelled."""
        while True:
            delay = self._core.next_wake() - time.monotonic()
            if delay <= 0:
                self._dispatch(ev.Wake())
                continue
            self._moved.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._moved.wait()
            except TimeoutError:
                pass

    def check_clock(self) -> bool:
        """Notice a system clock that was set, or a sleep, in which only the system clock goes on. To be
        called before any event that comes after it. Returns whether there was either."""
        offset_s = unix_offset_s()
        if abs(offset_s - self._unix_offset_s) <= CLOCK_MOVED_S:
            return False
        log.info("this machine's clock has moved by %.0f s", offset_s - self._unix_offset_s)
        self._unix_offset_s = offset_s
        self._dispatch(ev.TimeSet(offset_s))
        return True
