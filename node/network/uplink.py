"""Whose turn it is to have a chunk sent: few at a time where our line is slow, many side by side where not.

A line that many bodies share brings all of them too late, and what has come of them is thrown away. So only
as many of them cross it as it has lately carried at SHARE_BYTES_PER_S each. How fast the line is shows only
by what its takers take: so who takes next to nothing holds no place, and those known to take slowly hold
places against each other only. On a line that is slow that is everybody.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from gossamer.node.network.link import PeerLink
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.limits import TURN_PATIENCE_S

SHARE_BYTES_PER_S = 32 * 1024
"""What a body should get of the line at least: a MiB in 32 s, of the 48 s that its taker has for it, since
buffers make a line seem faster than it is. Were it more, many takers whose own lines are slow would be taken
for one slow line of ours."""

PLACES_MIN = 2
"""The line is not idle between two chunks, nor while a taker pauses."""

PACE_AT_FIRST = 128 * 1024
"""Bytes a second that the line is believed to carry until it has shown: 1 Mbit/s."""

FAST_BYTES_PER_S = 256 * 1024
"""2 Mbit/s: a line that has carried more is fast, and so is a taker that took its last chunks faster."""

PACE_HALF_LIFE_S = 120.0
"""The best that the line has carried is forgotten thus while it carries anything, since lines change."""

FLOW_S = 8.0
"""What crosses the line is averaged over so long."""

PIECE_BYTES = 32 * 1024
STALL_S = 4.0
"""Bodies are sent in pieces. A peer that takes less than one in so long holds no place: that is half of what
the slowest holder worth waiting for sends (FETCH_TIMEOUT_S), since two share a line."""

LARGE_PIECE_BYTES = 256 * 1024
"""A fast line's pieces, for takers that are not known to be slow: small ones cost processor time."""

BUFFERED_BYTES = 256 * 1024
"""So much may only fill a link's buffers: how fast the line is, and its peer, shows by more."""

LOOK_S = 0.5
"""So often whoever is next looks whether somebody has stalled."""


class BusyError(GossamerError):
    """The line is full, and was for as long as anybody is let wait."""


class _Taker:
    """How fast a link's peer takes what it is sent."""

    def __init__(self) -> None:
        self.is_slow = False
        """Whether it is known to take slowly."""
        self.free_at = -math.inf
        """When the last body to it ended."""
        self._filled = 0
        """What its connections' buffers were filled with since they were empty: BUFFERED_BYTES at most."""
        self._size = 0.0
        self._seconds = 0.0
        """Of its bodies, the last ones most."""

    def begins(self, now: float) -> None:
        """A body to it begins: by now its buffers may be empty."""
        if now - self.free_at > FLOW_S:
            self._filled = 0

    def past_buffers(self, size: int) -> int:
        """What of so many bytes that went out cannot only have filled buffers."""
        filling = min(size, BUFFERED_BYTES - self._filled)
        self._filled += filling
        return size - filling

    def ends(self, size: int, seconds: float, now: float) -> None:
        """A body has ended, after so many bytes. Several small ones show as much as a large one."""
        self.free_at = now
        self._size += size
        self._seconds += seconds
        if self._size > BUFFERED_BYTES:
            self.is_slow = self._size < FAST_BYTES_PER_S * self._seconds
            self._size /= 2
            self._seconds /= 2


class Turn:
    """One body that may cross the line now; `end` it."""

    def __init__(self, uplink: "Uplink", link: PeerLink, taker: _Taker) -> None:
        self._uplink = uplink
        self._link = link
        self.taker = taker
        self.began = self._since = uplink.clock()
        taker.begins(self.began)
        self.size = 0
        """What has gone out of it."""
        self._is_over = False

    def pieces(self, data: bytes) -> Iterator[memoryview]:
        """The body as it is to be sent: each piece has gone out when the next one is asked for.

        It may have to be sent again from its beginning, where a connection turns out to be closed.
        """
        rest = memoryview(data)
        while rest:
            is_fast = self._uplink.is_fast and not self.taker.is_slow
            size = LARGE_PIECE_BYTES if is_fast else PIECE_BYTES
            piece, rest = rest[:size], rest[size:]
            yield piece
            self.sent(len(piece))

    def sent(self, size: int) -> None:
        """One more piece of it has gone out."""
        self._uplink.carried(self.taker.past_buffers(size))
        self.size += size
        self._since = self._uplink.clock()

    def is_stalled(self) -> bool:
        return self._uplink.clock() - self._since > STALL_S

    def all_sent(self) -> None:
        """Only the answer is missing. A slow line is busy with what is in our buffers until that comes, if
        that is much: small bodies follow each other without waiting for answers."""
        if self.size <= PIECE_BYTES or self._uplink.is_fast:
            self.end()

    def end(self) -> None:
        """The chunk has been sent, or never will be. May be called more than once."""
        if not self._is_over:
            self._is_over = True
            self._uplink.left(self)
            self._link.serving.release()


class Uplink:
    """Our line, as far as chunks are sent over it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._takers: WeakKeyDictionary[PeerLink, _Taker] = WeakKeyDictionary()
        self._crossing: set[Turn] = set()
        self._next = {is_slow: asyncio.Lock() for is_slow in (False, True)}
        """Held by who waits for the next place, of those known to be slow and of the others; the others of
        its kind wait for it, in their order."""
        self._changed = asyncio.Event()
        self._flow = 0.0
        """Bytes a second, averaged over FLOW_S."""
        self._pace = float(PACE_AT_FIRST)
        """The best of that."""
        self._at = clock()

    @property
    def is_fast(self) -> bool:
        """Whether it has lately carried so much that it would be idle while an answer is on its way."""
        self._age()
        return self._pace > FAST_BYTES_PER_S

    @property
    def places(self) -> int:
        """How many bodies may cross it at a time."""
        self._age()
        return max(PLACES_MIN, int(self._pace / SHARE_BYTES_PER_S))

    async def turn(self, link: PeerLink) -> Turn:
        """Wait until a body may go to a link's peer: after those before it on the link, when there is room.

        Raises BusyError if there is none for TURN_PATIENCE_S since it was asked for, not counting the bodies
        before it on the link: others may have what is asked for.
        """
        asked_at = self.clock()
        await link.serving.acquire()
        try:
            taker = self._takers.setdefault(link, _Taker())
            since = max(asked_at, taker.free_at)
            await self._place(taker, since + TURN_PATIENCE_S - self.clock())
        except TimeoutError:
            link.serving.release()
            raise BusyError("busy") from None
        except BaseException:
            link.serving.release()
            raise
        turn = Turn(self, link, taker)
        self._crossing.add(turn)
        return turn

    async def _place(self, taker: _Taker, patience: float) -> None:
        """Wait for room. Raises TimeoutError."""
        async with asyncio.timeout(patience), self._next[taker.is_slow]:
            while not self._has_room_for(taker):
                await self._change()

    def _has_room_for(self, taker: _Taker) -> bool:
        rivals = [turn for turn in self._crossing if taker.is_slow or not turn.taker.is_slow]
        return sum(not turn.is_stalled() for turn in rivals) < self.places

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
        self._age()
        self._crossing.discard(turn)
        now = self.clock()
        turn.taker.ends(turn.size, now - turn.began, now)
        self._changed.set()

    def _age(self) -> None:
        """An idle line tells nothing about what it carries."""
        now = self.clock()
        self._flow *= math.exp((self._at - now) / FLOW_S)
        if self._crossing:
            self._pace *= 0.5 ** ((now - self._at) / PACE_HALF_LIFE_S)
        self._at = now
