"""Which chunks are sent, and when: how many in all and to each member, and how many share our line.

A peer that asks while we are busy, or that has used up its ration, is declined at once and turns to another
holder. Otherwise everybody would wait at the nodes with many links, while the same chunks were available
nearby.

If too many bodies share our line, all of them come too late, and the parts that have come are thrown away. So
only as many bodies are sent at a time as the line has lately carried at SHARE_BYTES_PER_S each: few on a slow
line, many side by side on a fast one. Only what peers read shows how fast the line is. So a peer that reads
next to nothing holds no place, and peers known to be slow compete for places only with each other. On a slow
line that is all of them.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol.access.rate_limits import Rations
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.limits import (
    PUTS_PER_LINK_MAX,
    TURN_PATIENCE_S,
    UPLOAD_SLOT_S,
    UPLOADS_MAX,
    UPLOADS_PER_MEMBER_MAX,
)

SHARE_BYTES_PER_S = 32 * 1024
"""The least that a body should get of the line: a MiB in 32 s. Its reader waits 48 s for that, but buffers
make a line seem faster than it is. If this were more, many readers with slow lines of their own would be
mistaken for one slow line of ours."""

PLACES_MIN = 2
"""With two, the line is not idle between two chunks, nor while a reader pauses."""

PACE_AT_FIRST = 128 * 1024
"""Bytes per second that the line is assumed to carry until it has shown more: 1 Mbit/s."""

FAST_BYTES_PER_S = 256 * 1024
"""2 Mbit/s: a line that has carried more is fast, and so is a peer that read its last chunks faster."""

PACE_HALF_LIFE_S = 120.0
"""Half-life of the best rate that the line has carried, while it carries anything: lines change."""

FLOW_S = 8.0
"""The line's rate is averaged over this time."""

PIECE_BYTES = 32 * 1024
STALL_S = 4.0
"""Bodies are sent in pieces. A peer that reads less than one piece in this time holds no place: that is half
the rate of the slowest holder worth waiting for (FETCH_TIMEOUT_S), since two share a line."""

LARGE_PIECE_BYTES = 256 * 1024
"""Size of the pieces on a fast line, for peers that are not known to be slow: small ones cost CPU time."""

BUFFERED_BYTES = 256 * 1024
"""Up to this many bytes may merely fill a link's buffers. Only more shows how fast line and peer are."""

STALL_CHECK_S = 0.5
"""How often the waiter that is next checks whether a body has stalled."""


class BusyError(GossamerError):
    """Too much is being sent, or the member's ration is used up: other holders may have the chunk."""


class PeerUploads:
    """What goes out over one link, and how fast its peer reads it."""

    def __init__(self) -> None:
        self.sending = asyncio.Lock()
        """Held while a body waits for its place and goes out. Bodies go one after another, since the first
        of several chunks is of use before all have been sent."""
        self.puts = asyncio.Semaphore(PUTS_PER_LINK_MAX)
        self.asked = 0
        """Chunks that the peer has asked us to put and not yet received."""
        self.is_slow = False
        """Whether the peer is known to read slowly."""
        self.free_at = -math.inf
        """When the last body to it ended."""
        self.filled = 0
        """Bytes that have filled its connections' buffers since these were empty: BUFFERED_BYTES at most."""
        self.size = 0.0
        self.seconds = 0.0
        """Bytes and seconds of its bodies, the latest weighing most."""


class Upload:
    """One body that may be sent now."""

    def __init__(self, limits: "UploadLimits", peer: PeerUploads) -> None:
        self._limits = limits
        self.peer = peer
        self.began = self._since = limits.clock()
        if self.began - peer.free_at > FLOW_S:
            peer.filled = 0  # by now its buffers may be empty
        self.size = 0
        """Bytes of it that have gone out."""
        self._is_over = False

    def pieces(self, data: bytes) -> Iterator[memoryview]:
        """The body in the pieces to send: each piece has gone out when the next one is asked for. It may have
        to be sent again from its beginning, if a connection turns out to be closed."""
        rest = memoryview(data)
        while rest:
            is_fast = self._limits.is_fast and not self.peer.is_slow
            size = LARGE_PIECE_BYTES if is_fast else PIECE_BYTES
            piece, rest = rest[:size], rest[size:]
            yield piece
            self.sent(len(piece))

    def sent(self, size: int) -> None:
        filling = min(size, BUFFERED_BYTES - self.peer.filled)
        self.peer.filled += filling
        self._limits.carried(size - filling)  # the rest has gone out for sure
        self.size += size
        self._since = self._limits.clock()

    def is_stalled(self) -> bool:
        return self._limits.clock() - self._since > STALL_S

    def all_sent(self) -> None:
        """Only the answer is missing. On a slow line a large body keeps its place until that comes, since the
        line is busy with our buffers."""
        if self.size <= PIECE_BYTES or self._limits.is_fast:
            self.end()

    def end(self) -> None:
        """The chunk has been sent, or never will be. May be called more than once."""
        if not self._is_over:
            self._is_over = True
            self._limits.left(self)
            self.peer.sending.release()


class UploadLimits:
    """All chunks that are sent, and the line that they share."""

    def __init__(self, store: ChunkStore | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Members' rations are measured against the `store`; without one there are no rations."""
        self.clock = clock
        self._store = store
        self._rations = Rations()
        self._begun: dict[object, tuple[float, bytes]] = {}
        """For the uploads that count, oldest first: when each began, and for which node id."""
        self._crossing: set[Upload] = set()
        self._next = {is_slow: asyncio.Lock() for is_slow in (False, True)}
        """Two queues for a place, one for slow peers and one for the others. The waiter that is next holds
        the lock; the others of its kind wait for the lock, in order."""
        self._changed = asyncio.Event()
        self._flow = 0.0
        """Bytes per second, averaged over FLOW_S."""
        self._pace = float(PACE_AT_FIRST)
        """The best `_flow` lately."""
        self._at = clock()

    @contextmanager
    def counted(self, node_id: bytes, blob: bytes) -> Iterator[None]:
        """Count an upload while the block runs. Raises BusyError if there is no room, or no ration left. One
        that takes long no longer counts, and no member gets all the room: so no peer can block us."""
        now = self.clock()
        self._begun = {key: one for key, one in self._begun.items() if one[0] >= now - UPLOAD_SLOT_S}
        theirs = sum(of_one == node_id for _, of_one in self._begun.values())
        if len(self._begun) >= UPLOADS_MAX or theirs >= UPLOADS_PER_MEMBER_MAX:
            raise BusyError("busy")
        store = self._store
        if store is not None and not self._rations.take(node_id, store.length(blob), store.stock, now):
            raise BusyError("the ration is used up")
        key = object()
        self._begun[key] = now, node_id
        try:
            yield
        finally:
            self._begun.pop(key, None)

    @asynccontextmanager
    async def place(self, peer: PeerUploads) -> AsyncIterator[Upload]:
        """Wait until a body may go to a peer: when there is room on the line, after those before it on the
        link.

        Raises BusyError if there is no room for TURN_PATIENCE_S, not counting the time for those bodies.
        """
        asked_at = self.clock()
        await peer.sending.acquire()
        try:
            patience = max(asked_at, peer.free_at) + TURN_PATIENCE_S - self.clock()
            async with asyncio.timeout(patience), self._next[peer.is_slow]:
                while not self._has_room_for(peer):
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(STALL_CHECK_S):
                            await self._changed.wait()
        except BaseException as error:
            peer.sending.release()
            if isinstance(error, TimeoutError):
                raise BusyError("busy") from None
            raise
        upload = Upload(self, peer)
        self._crossing.add(upload)
        try:
            yield upload
        finally:
            upload.end()

    @property
    def is_fast(self) -> bool:
        """Whether the line has lately carried so much that it would be idle while an answer is on its way."""
        self._age()
        return self._pace > FAST_BYTES_PER_S

    @property
    def places(self) -> int:
        """How many bodies may be sent at a time."""
        self._age()
        return max(PLACES_MIN, int(self._pace / SHARE_BYTES_PER_S))

    def _has_room_for(self, peer: PeerUploads) -> bool:
        rivals = [upload for upload in self._crossing if peer.is_slow or not upload.peer.is_slow]
        return sum(not upload.is_stalled() for upload in rivals) < self.places

    # -- what the bodies show of the line

    def carried(self, size: int) -> None:
        self._age()
        self._flow += size / FLOW_S
        if self._flow > self._pace:
            self._pace = self._flow
            self._changed.set()

    def left(self, upload: Upload) -> None:
        self._age()
        self._crossing.discard(upload)
        peer = upload.peer
        peer.free_at = self.clock()
        peer.size += upload.size  # several small bodies tell as much as one large one
        peer.seconds += peer.free_at - upload.began
        if peer.size > BUFFERED_BYTES:
            peer.is_slow = peer.size < FAST_BYTES_PER_S * peer.seconds
            peer.size /= 2
            peer.seconds /= 2
        self._changed.set()

    def _age(self) -> None:
        """Let the averages age. The pace ages only while something is sent: an idle line tells nothing."""
        now = self.clock()
        self._flow *= math.exp((self._at - now) / FLOW_S)
        if self._crossing:
            self._pace *= 0.5 ** ((now - self._at) / PACE_HALF_LIFE_S)
        self._at = now
