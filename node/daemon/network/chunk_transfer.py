"""Chunks over HTTP, both ways, as the core has scheduled them (`Get`, `Put`, `Want`), and which go out when.

Whoever has dialled makes the requests: it gets chunks from its peer, and puts to it what the peer asks for.
`serve` and `take` are the other end of both. A body is a chunk as it travels, packed or as it is. Here only
its length and its hash are checked. While the disk takes nothing, nothing is fetched.

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
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from email.utils import formatdate
from hashlib import sha256

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from gossamer.node.daemon.network.links import SESSION_HEADER, LinkTable, PeerLink, PeerUploads
from gossamer.node.daemon.network.sockets import WRITE_BUFFER_BYTES, cut
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.disk import Disk
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.access.rate_limits import Rations
from gossamer.protocol.errors import (
    Offence,
    PayloadError,
    PeerError,
    RefusedError,
    StorageError,
)
from gossamer.protocol.identity import short
from gossamer.protocol.limits import (
    ASKS_PER_LINK_MAX,
    CHUNK_BYTES_MAX,
    DECLINED_MISSES,
    FETCH_TIMEOUT_S,
    FETCHES_PER_LINK_MAX,
    SMALL_CHUNK_BYTES,
    TURN_PATIENCE_S,
    UPLOAD_SLOT_S,
    UPLOADS_MAX,
    UPLOADS_PER_MEMBER_MAX,
)
from gossamer.protocol.messages import Decline, Want, encode
from gossamer.protocol.payloads import Chunk, packed_size, unpack_chunk
from gossamer.protocol.replica import Replica

LINK = web.RequestKey("link", PeerLink)
"""The link that a request for or with a chunk belongs to."""

ENCODING_HEADER = "Content-Encoding"
PACKED = "packed"

LARGE_PIECE_BYTES = 256 * 1024
"""Bodies are read in pieces of this size: the fastest as measured on loopback, and a bound on buffering. They
are sent so on a fast line, to peers that are not known to be slow: small pieces cost CPU time."""

GET_TIMEOUT = aiohttp.ClientTimeout(total=FETCHES_PER_LINK_MAX * FETCH_TIMEOUT_S)
"""A peer sends one chunk after another. The core decides how long each is worth waiting for, up to this."""

DISK_PATIENCE_S = 2.0
"""For the disk to be writable. Less than FETCH_OVERDUE_S: a peer that was not even asked must not pass for a
slow one."""

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

BUFFERED_BYTES = 256 * 1024
"""Up to this many bytes may merely fill a link's buffers. Only more shows how fast line and peer are."""

STALL_CHECK_S = 0.5
"""How often the waiter that is next checks whether a body has stalled."""

log = logging.getLogger("gossamer.chunk_transfer")


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
        self._flowed(size - filling)
        self.size += size
        self._since = self._limits.clock()

    @property
    def rate(self) -> float:
        """Bytes per second that the link has carried, over FLOW_S: less would show how fast buffers fill, and
        large ones take whole chunks. A link passes for slow until it has shown more."""
        self._flowed(0)
        return max(self.peer.flow, PACE_AT_FIRST)

    def _flowed(self, size: int) -> None:
        peer, now = self.peer, self._limits.clock()
        peer.flow = peer.flow * math.exp((peer.flow_at - now) / FLOW_S) + size / FLOW_S
        peer.flow_at = now

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
        """Count an upload while the block runs. Raises RefusedError if there is no room, or no ration left.
        One that takes long no longer counts, and no member gets all the room: so no peer can block us."""
        now = self.clock()
        self._begun = {key: one for key, one in self._begun.items() if one[0] >= now - UPLOAD_SLOT_S}
        theirs = sum(of_one == node_id for _, of_one in self._begun.values())
        if len(self._begun) >= UPLOADS_MAX or theirs >= UPLOADS_PER_MEMBER_MAX:
            raise RefusedError("busy")
        store = self._store
        if store is not None and not self._rations.take(node_id, store.length(blob), store.stock, now):
            raise RefusedError("the ration is used up")
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

        Raises RefusedError if there is no room for TURN_PATIENCE_S, not counting the time for those bodies.
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
                raise RefusedError("busy") from None
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
        if self._store is not None:
            self._store.packing.rate = self._pace
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


class ChunkTransfer:
    """Gets, puts, serves and takes the chunks of one node."""

    def __init__(
        self,
        links: LinkTable,
        store: ChunkStore,
        shelf: SnapshotShelf,
        disk: Disk,
        core: Replica,
        dispatch: Callable[[ev.Event], object],
        damaged: Callable[[bytes], object],
    ) -> None:
        """`damaged` is called with the hash of a chunk that is missing or damaged on disk."""
        self._links = links
        self._store = store
        self._shelf = shelf
        self._disk = disk
        self._core = core
        self._dispatch = dispatch
        self._damaged = damaged
        self._limits = UploadLimits(store)

    # -- what comes

    async def get(self, link: PeerLink, effect: fx.Get) -> None:
        """Fetch a chunk from a peer that we dialled, and report the outcome to the core.

        The fetch ends with the link. Otherwise a peer that never answers and links to us again and again
        could take up all connections.
        """
        data = None
        try:
            if await self._disk.writable(DISK_PATIENCE_S):
                fetch = self.get_chunk(link, effect.blob, effect.size)
                data = await link.while_up(fetch, effect.patience)
        except (PeerError, OSError, aiohttp.ClientError) as error:
            log.debug("fetching from %s: %s", short(link.node_id), error)
        if data is None or not await self._keep(effect.blob, data):
            self._dispatch(ev.ChunkFailed(link.number, effect.blob))

    async def keep(self, link: PeerLink, effect: fx.Keep) -> None:
        """Store a chunk that came along with its record."""
        link.traffic.received -= len(effect.data)
        link.traffic.payload_received += len(effect.data)
        try:
            is_packed = len(effect.data) < effect.size
            data = self._checked(effect.data, effect.blob, effect.size, link, is_packed=is_packed)
        except PeerError:
            data = b""
        if not data or not await self._keep(effect.blob, data):
            self._dispatch(ev.ChunkFailed(link.number, effect.blob))

    async def ask(self, link: PeerLink, want: Want) -> None:
        """Have a peer that dialled us put a chunk, unless it could not be kept."""
        if await self._disk.writable(DISK_PATIENCE_S):
            link.send(encode(want))
        else:
            self._dispatch(ev.ChunkFailed(link.number, want.blob))

    async def take(self, request: web.Request) -> web.Response:
        """A peer puts a chunk that we asked it for."""
        link = request[LINK]
        link.note_date(request.headers.get("Date"))
        blob = bytes.fromhex(request.match_info["hash"])
        size = self._core.fetcher.expected_size(blob)
        if size is None or size > CHUNK_BYTES_MAX:
            raise web.HTTPConflict(text="not asked for")
        refusal: web.HTTPException = web.HTTPInsufficientStorage(text="cannot store it now")
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                data = await self._receive(request, blob, size, link)
            if await self._keep(blob, data):
                return web.Response(status=204)
        except (PeerError, OSError, aiohttp.ClientError, web.RequestPayloadError) as error:
            refusal = web.HTTPBadRequest(text=str(error))  # a line that broke is not worth a traceback
        self._dispatch(ev.ChunkFailed(link.number, blob))
        raise refusal

    async def get_chunk(self, link: PeerLink, blob: bytes, size: int) -> bytes:
        """Fetch a chunk of at most `size` bytes. Raises PeerError, OSError or aiohttp.ClientError."""
        way = link.dialled
        assert way is not None, "the core gets chunks from those that we dialled"
        async with way.http.get(
            f"{way.base_url}/chunk/{blob.hex()}",
            headers={SESSION_HEADER: link.session.hex()},
            ssl=way.ssl,
            allow_redirects=False,
            timeout=GET_TIMEOUT,
        ) as response:
            link.note_date(response.headers.get("Date"))
            if response.status != 200:
                raise RefusedError(f"{short(link.node_id)} does not have chunk {short(blob)}")
            return await self._receive(response, blob, size, link)

    async def _receive(
        self, message: aiohttp.ClientResponse | web.BaseRequest, blob: bytes, size: int, link: PeerLink
    ) -> bytes:
        """Read a chunk of at most `size` bytes that hashes to `blob`.

        Raises PayloadError for another chunk, an offence; RefusedError for a longer one, which is none: a
        record may have lied about the size of somebody else's chunk.
        """
        body = bytearray()
        async for piece in message.content.iter_chunked(LARGE_PIECE_BYTES):
            link.traffic.payload_received += len(piece)
            body += piece
            if len(body) > size:
                break
        is_packed = message.headers.get(ENCODING_HEADER) == PACKED
        return self._checked(bytes(body), blob, size, link, is_packed=is_packed)

    def _checked(self, data: bytes, blob: bytes, size: int, link: PeerLink, *, is_packed: bool) -> bytes:
        """A chunk as it came, unpacked. Raises as `_receive` does."""
        what = f"{short(link.node_id)} sent a chunk that is not {short(blob)}"
        try:
            if len(data) > size or (is_packed and packed_size(data) > size):
                raise RefusedError(what)
            if is_packed:
                data = unpack_chunk(data)
            if sha256(data).digest() != blob:
                raise PayloadError(what)
        except PayloadError as error:
            self._links.blame(link.node_id, str(error), Offence.CHUNK)
            raise
        return data

    async def _keep(self, blob: bytes, data: bytes) -> bool:
        """Store a chunk and tell the core; returns whether that is done. One that is no longer of use, since
        what it belongs to was given up meanwhile, is dropped."""
        if self._core.fetcher.wants.keys_of(blob) and not await self._disk.try_write(
            self._store.put, blob, data, is_read_next=True
        ):
            return False
        self._dispatch(ev.ChunkArrived(blob))
        return True

    # -- what goes

    async def put(self, link: PeerLink, blob: bytes) -> None:
        """Put a chunk to a peer that we dialled and that asks for it, or decline."""
        uploads, sent = link.uploads, 0
        if uploads.asked >= ASKS_PER_LINK_MAX:
            return link.send(encode(Decline(blob)))
        uploads.asked += 1
        try:
            sent = await link.while_up(self._put(link, blob)) or 0
        finally:
            uploads.asked -= 1
        if sent < SMALL_CHUNK_BYTES and (pause := self._links.scores.charge_misses(link.node_id)):
            async with uploads.puts:  # the peer's next chunks wait
                await asyncio.sleep(pause)

    async def _put(self, link: PeerLink, blob: bytes) -> int:
        """Send a chunk, or decline; returns the number of bytes sent."""
        try:
            self._check_here(blob)
            with self._limits.counted(link.node_id, blob):
                async with link.uploads.puts, self._limits.place(link.uploads) as upload:
                    chunk = await self._read(blob, upload.rate)
                    await put_chunk(link, blob, chunk, upload)
                    return len(chunk.as_it_travels)
        except (PeerError, MissingChunkError, OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("sending to %s: %s", short(link.node_id), error)
            link.send(encode(Decline(blob)))
            return 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """A peer gets a chunk, unless it is not here (then it waits for no place), or we are busy. The next
        request on the same connection begins only when this one has returned."""
        link = request[LINK]
        blob = bytes.fromhex(request.match_info["hash"])
        try:
            self._check_here(blob)
            with self._limits.counted(link.node_id, blob):
                async with self._limits.place(link.uploads) as upload:
                    if link.is_closing or request.transport is None or request.transport.is_closing():
                        raise web.HTTPForbidden(text="nobody waits for it any more")
                    chunk = await self._read(blob, upload.rate)
                    body = chunk.as_it_travels
                    response = web.StreamResponse(headers=headers_of(chunk))
                    response.content_length = len(body)
                    await response.prepare(request)
                    try:
                        async with asyncio.timeout(FETCH_TIMEOUT_S):
                            for piece in upload.pieces(body):
                                await response.write(piece)
                                link.traffic.payload_sent += len(piece)
                    except (OSError, aiohttp.ClientError) as error:  # a broken line, or nobody reads
                        log.debug("sending chunk to %s: %s", short(link.node_id), error)
                        if request.transport is not None:
                            cut(request.transport)
        except MissingChunkError:
            raise web.HTTPNotFound(text="not here") from None
        except RefusedError as error:  # the answer sends the peer to other holders
            await asyncio.sleep(self._links.scores.charge_misses(link.node_id, DECLINED_MISSES))
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        if len(body) < SMALL_CHUNK_BYTES:
            await asyncio.sleep(self._links.scores.charge_misses(link.node_id))
        return response

    def _check_here(self, blob: bytes) -> None:
        """Raise MissingChunkError unless a chunk is here. A snapshot that it is part of counts as used."""
        self._shelf.touch(blob)
        if blob not in self._store:
            raise MissingChunkError(blob)

    async def _read(self, blob: bytes, rate: float) -> Chunk:
        """A chunk as it goes to a peer that reads so many bytes a second. Raises MissingChunkError."""
        self._check_here(blob)
        try:
            return await asyncio.to_thread(self._store.to_send, blob, rate)
        except MissingChunkError:
            self._damaged(blob)
            raise
        except StorageError as error:
            log.debug("%s", error)
            raise MissingChunkError(blob) from None


class _Body(aiohttp.payload.Payload):
    """A chunk as it is sent, piece by piece."""

    def __init__(self, data: bytes, upload: Upload) -> None:
        super().__init__(data)
        self._size = len(data)
        self._data = data
        self._upload = upload

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a chunk is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        if isinstance(writer, aiohttp.http.StreamWriter) and writer.transport is not None:
            writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        for piece in self._upload.pieces(self._data):
            await writer.write(piece)
        self._upload.all_sent()


async def put_chunk(link: PeerLink, blob: bytes, chunk: Chunk, upload: Upload) -> None:
    """Send a chunk in its place. Raises PeerError, OSError or aiohttp.ClientError."""
    way, body = link.dialled, chunk.as_it_travels
    assert way is not None, "the core has chunks put to those that we dialled"
    async with way.http.put(
        f"{way.base_url}/chunk/{blob.hex()}",
        data=_Body(body, upload),
        headers={SESSION_HEADER: link.session.hex(), "Date": formatdate(usegmt=True), **headers_of(chunk)},
        ssl=way.ssl,
        allow_redirects=False,
    ) as response:
        link.note_date(response.headers.get("Date"))
        if response.status != 204:
            raise RefusedError(f"{short(link.node_id)} did not take chunk {short(blob)}")
    link.traffic.payload_sent += len(body)


def headers_of(chunk: Chunk) -> dict[str, str]:
    """HTTP headers for a body that is a chunk as it travels."""
    return {} if chunk.frame is None else {ENCODING_HEADER: PACKED}
