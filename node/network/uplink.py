"""Whose turn it is to have a chunk sent: few at a time where our line is slow, many side by side where not.

A line that many bodies share brings all of them too late, and what has come of them is thrown away. So only
as many of them cross it as it has lately carried at SHARE_BYTES_PER_S each. Who takes next to nothing holds
no place, and who has taken a chunk fast waits for none: slow takers cannot keep it from a line that is idle.
"""

import asyncio
import math
import time
from collections.abc import Callable
from weakref import WeakSet

from gossamer.node.network.link import PeerLink
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.limits import TURN_PATIENCE_S

SHARE_BYTES_PER_S = 64 * 1024
"""What a body should get of the line at least: a chunk in 16 s, of the 48 s that its taker has for it."""

PLACES_MIN = 2
"""The line is not idle between two chunks, nor while a taker pauses."""

PACE_AT_FIRST = 4 * SHARE_BYTES_PER_S
"""Bytes a second that the line is believed to carry until more has crossed it: 2 Mbit/s."""

PACE_HALF_LIFE_S = 120.0
"""The best that the line has carried is forgotten thus, since lines change."""

FLOW_S = 8.0
"""What crosses the line is averaged over so long: what only fills connections' buffers counts little."""

PIECE_BYTES = 32 * 1024
STALL_S = 4.0
"""Bodies are sent in pieces. Who takes less than one in so long holds no place: that is half of what the
slowest holder worth waiting for sends (FETCH_TIMEOUT_S), since two share a line."""

BUFFERED_BYTES = 256 * 1024
"""So much of a body may only fill buffers: the rest of it shows how fast it went."""

LOOK_S = 0.5
"""So often whoever is next looks whether somebody has stalled."""


class BusyError(GossamerError):
    """The line is full, and was for as long as anybody is let wait."""


class Turn:
    """One body that may cross the line now; `end` it."""

    def __init__(self, uplink: "Uplink", link: PeerLink) -> None:
        self._uplink = uplink
        self.link = link
        self.began = self._since = uplink.clock()
        self.size = 0
        """What has gone out of it."""
        self._is_over = False

    def sent(self, size: int) -> None:
        """One more piece of it has gone out."""
        self._uplink.carried(size)
        self.size += size
        self._since = self._uplink.clock()

    def is_stalled(self) -> bool:
        return self._uplink.clock() - self._since > STALL_S

    def all_sent(self) -> None:
        """Only the answer is missing. A slow line is busy with what is in our buffers until that comes."""
        if self._uplink.is_fast:
            self.end()

    def end(self) -> None:
        """It has gone out, or nowhere. Again is harmless."""
        if not self._is_over:
            self._is_over = True
            self.link.serving.release()
            self._uplink.left(self)


class Uplink:
    """Our line, as far as chunks are sent over it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._crossing: set[Turn] = set()
        self._next = asyncio.Lock()
        """Held by who waits for the next place; the others wait for it, in their order."""
        self._changed = asyncio.Event()
        self._fast_takers: WeakSet[PeerLink] = WeakSet()
        """Those whose last chunk went so fast that they need not wait for others."""
        self._flow = 0.0
        """Bytes a second, averaged over FLOW_S."""
        self._pace = float(PACE_AT_FIRST)
        """The best of that."""
        self._at = clock()

    @property
    def is_fast(self) -> bool:
        """Whether it has lately carried so much that it would be idle while an answer is on its way."""
        self._age()
        return self._pace > PACE_AT_FIRST

    @property
    def places(self) -> int:
        """How many bodies may cross it at a time."""
        self._age()
        return max(PLACES_MIN, int(self._pace / SHARE_BYTES_PER_S))

    async def turn(self, link: PeerLink) -> Turn:
        """Wait until a body may go to a link's peer: after those before it on the link, when there is room.

        Raises BusyError if there is none for TURN_PATIENCE_S: others may have what is asked for.
        """
        await link.serving.acquire()
        try:
            if link not in self._fast_takers:
                await self._place()
        except TimeoutError:
            link.serving.release()
            raise BusyError("busy") from None
        except BaseException:
            link.serving.release()
            raise
        turn = Turn(self, link)
        self._crossing.add(turn)
        return turn

    async def _place(self) -> None:
        """Wait for room. Raises TimeoutError."""
        async with asyncio.timeout(TURN_PATIENCE_S), self._next:
            while sum(not turn.is_stalled() for turn in self._crossing) >= self.places:
                await self._change()

    async def _change(self) -> None:
        """Wait until somebody leaves the line, or may have stalled."""
        self._changed.clear()
        timer = asyncio.get_running_loop().call_later(LOOK_S, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    # -- what turns tell

    def carried(self, size: int) -> None:
        self._age()
        self._flow += size / FLOW_S
        if self._flow > self._pace:
            self._pace = self._flow
            self._changed.set()

    def left(self, turn: Turn) -> None:
        self._crossing.discard(turn)
        if turn.size > BUFFERED_BYTES:
            if (turn.size - BUFFERED_BYTES) > PACE_AT_FIRST * (self.clock() - turn.began):
                self._fast_takers.add(turn.link)
            else:
                self._fast_takers.discard(turn.link)
        self._changed.set()

    def _age(self) -> None:
        now = self.clock()
        self._flow *= math.exp((self._at - now) / FLOW_S)
        self._pace *= 0.5 ** ((now - self._at) / PACE_HALF_LIFE_S)
        self._at = now
