"""Wakes the core when it asked for it, and tells it of a clock that was set."""

import asyncio
import logging
import time
from collections.abc import Callable

from gossamer.protocol import events as ev
from gossamer.protocol.core.replica import Replica

CLOCK_MOVED_S = 2.0
"""What time servers correct by and by is none of our business."""

log = logging.getLogger("gossamer.node")


def unix_offset_s() -> float:
    """Unix time less the monotonic clock, seconds."""
    return time.time() - time.monotonic()


class Timekeeper:
    """The core's timer."""

    def __init__(self, core: Replica, dispatch: Callable[[ev.Event], object]) -> None:
        self._core = core
        self._dispatch = dispatch
        self._unix_offset_s = unix_offset_s()
        self._moved = asyncio.Event()

    def look(self) -> None:
        """The core may want to be woken at another time."""
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
        """Notice a clock that was set, and a sleep, in which only the one for people goes on: before anything
        that comes after it. Returns whether there was either."""
        offset_s = unix_offset_s()
        if abs(offset_s - self._unix_offset_s) <= CLOCK_MOVED_S:
            return False
        log.info("this machine's clock has moved by %.0f s", offset_s - self._unix_offset_s)
        self._unix_offset_s = offset_s
        self._dispatch(ev.TimeSet(offset_s))
        return True
