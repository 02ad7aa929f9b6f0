"""Carries out the transfers of chunks that the core has scheduled: `Get`, `Put`, and `Ask`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from hashlib import sha256
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from gossamer.node.daemon.network.connections import WRITE_BUFFER_BYTES
from gossamer.node.daemon.network.links import SESSION_HEADER, Chunks, Dialled, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.tls import cut
from gossamer.node.daemon.network.upload_limits import BusyError, Turn, UploadLimits
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.disk import Disk
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import Offence, PayloadError, PeerError, RefusedError, StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.limits import (
    ASKS_PER_LINK_MAX,
    CHUNK_BYTES_MAX,
    FETCH_TIMEOUT_S,
    FETCHES_PER_LINK_MAX,
    PUTS_PER_LINK_MAX,
    SMALL_CHUNK_BYTES,
)
from gossamer.protocol.messages import Decline, Want, encode
from gossamer.protocol.payloads.chunks import Chunk, packed_size, unpack_chunk
from gossamer.protocol.replica import Replica

# --- A chunk as the body of an answer or a request, packed or as it is, in both directions.
#
# Only the length and the hash of a received chunk are checked here.

ENCODING_HEADER = "Content-Encoding"
ZSTD = "zstd"

READ_PIECE_BYTES = 256 * 1024
"""Bodies are read in pieces of this size: the fastest as measured on loopback, and a bound on buffering."""


def headers_of(chunk: Chunk) -> dict[str, str]:
    """HTTP headers for a body that is a chunk as it travels."""
    return {} if chunk.frame is None else {ENCODING_HEADER: ZSTD}


async def receive(
    message: aiohttp.ClientResponse | web.BaseRequest, blob: bytes, size: int, link: PeerLink
) -> bytes:
    """Read a chunk of at most `size` bytes that hashes to `blob`.

    Raises PayloadError for another chunk. Raises RefusedError for a longer one, for which the sender is not
    to blame: a record may have lied about the size of somebody else's chunk.
    """
    body = bytearray()
    async for piece in message.content.iter_chunked(READ_PIECE_BYTES):
        link.traffic.payload_received += len(piece)
        body += piece
        if len(body) > size:
            break
    what = f"{short(link.node_id)} sent a chunk that is not {short(blob)}"
    data = bytes(body)
    is_packed = message.headers.get(ENCODING_HEADER) == ZSTD
    if len(data) > size or (is_packed and packed_size(data) > size):
        raise RefusedError(what)
    if is_packed:
        data = unpack_chunk(data)
    if sha256(data).digest() != blob:
        raise PayloadError(what)
    return data


# While the disk takes nothing, no chunks are fetched.

PATIENCE_S = 2.0
"""Less than FETCH_OVERDUE_S: a peer that was not even asked must not pass for a slow one."""

log = logging.getLogger("gossamer.transfers")


# --- Chunks over HTTP, from our side: getting them from a peer that we dialled, and putting them to it.
#
# `chunk_routes` is the other end.

GET_TIMEOUT = aiohttp.ClientTimeout(total=FETCHES_PER_LINK_MAX * FETCH_TIMEOUT_S)
"""A peer sends one chunk after another. The core decides how long each is worth waiting for, up to this."""


class _Body(aiohttp.payload.Payload):
    """A chunk as it is sent, piece by piece, during its turn."""

    def __init__(self, data: bytes, turn: Turn) -> None:
        super().__init__(data)
        self._size = len(data)
        self._data = data
        self._turn = turn

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a chunk is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        if isinstance(writer, aiohttp.http.StreamWriter) and writer.transport is not None:
            writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        for piece in self._turn.pieces(self._data):
            await writer.write(piece)
        self._turn.all_sent()


async def get_chunk(link: PeerLink, blob: bytes, size: int) -> bytes:
    """Fetch a chunk of at most `size` bytes. Raises PeerError, OSError or aiohttp.ClientError."""
    way = _way_of(link)
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
        return await receive(response, blob, size, link)


async def put_chunk(link: PeerLink, blob: bytes, chunk: Chunk, turn: Turn) -> None:
    """Send a chunk during its turn. Raises PeerError, OSError or aiohttp.ClientError."""
    way, body = _way_of(link), chunk.as_it_travels
    async with way.http.put(
        f"{way.base_url}/chunk/{blob.hex()}",
        data=_Body(body, turn),
        headers={SESSION_HEADER: link.session.hex(), "Date": formatdate(usegmt=True), **headers_of(chunk)},
        ssl=way.ssl,
        allow_redirects=False,
    ) as response:
        link.note_date(response.headers.get("Date"))
        if response.status != 204:
            raise RefusedError(f"{short(link.node_id)} did not take chunk {short(blob)}")
    link.traffic.payload_sent += len(body)


def _way_of(link: PeerLink) -> Dialled:
    assert link.dialled is not None, "the core asks those who dialled us to put"
    return link.dialled


# --- Chunks over HTTP: the routes by which linked peers get and put them.
#
# `Chunks` knows which chunks are here and which are wanted. `chunk_requests` is the other end.

log_chunk_routes = logging.getLogger("gossamer.transport")


class ChunkRoutes:
    """The server's side, for requests that belong to a link."""

    def __init__(self, chunks: Chunks, scores: PeerScores, uploads: UploadLimits) -> None:
        self._chunks = chunks
        self._scores = scores
        self._uploads = uploads

    async def serve(self, link: PeerLink, request: web.Request) -> web.StreamResponse:
        """A peer gets a chunk, unless the chunk is not here, our line is full, or we are busy otherwise.

        A request for a chunk that is not here does not wait for a turn. The next request on the same
        connection begins only when this one has returned.
        """
        blob = bytes.fromhex(request.match_info["hash"])
        upload = self._uploads.begin(link.node_id, blob)
        if upload is None:
            raise await self._busy(link)
        try:
            if not self._chunks.holds(blob):
                raise web.HTTPNotFound(text="not here")
            turn = await self._uploads.uplink.turn(link)
            try:
                if link.is_closing or request.transport is None or request.transport.is_closing():
                    raise web.HTTPForbidden(text="nobody waits for it any more")
                chunk = await self._chunks.read_chunk(blob)
                if chunk is None:
                    raise web.HTTPNotFound(text="not here")
                response = await self._send(request, link, chunk, turn)
            finally:
                turn.end()
        except BusyError:
            raise await self._busy(link) from None
        finally:
            self._uploads.end(upload)
        if len(chunk.as_it_travels) < SMALL_CHUNK_BYTES:
            await asyncio.sleep(self._scores.gave_little(link.node_id))
        return response

    async def _busy(self, link: PeerLink) -> web.HTTPServiceUnavailable:
        """The answer that sends a peer to other holders. It comes soon if the peer seldom asks in vain."""
        await asyncio.sleep(self._scores.declined(link.node_id))
        return web.HTTPServiceUnavailable(text="busy")

    async def _send(
        self, request: web.Request, link: PeerLink, chunk: Chunk, turn: Turn
    ) -> web.StreamResponse:
        headers, body = {"Content-Type": "application/octet-stream", **headers_of(chunk)}, chunk.as_it_travels
        response = web.StreamResponse(headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                for piece in turn.pieces(body):
                    await response.write(piece)
                    link.traffic.payload_sent += len(piece)
        except (OSError, aiohttp.ClientError) as error:  # a line that broke, or a peer that reads nothing
            log_chunk_routes.debug("sending chunk %s: %s", short(link.node_id), error)
            if request.transport is not None:
                cut(request.transport)
        return response

    async def take(self, link: PeerLink, request: web.Request) -> web.Response:
        """A peer puts a chunk that we asked it for."""
        link.note_date(request.headers.get("Date"))
        blob = bytes.fromhex(request.match_info["hash"])
        size = self._chunks.expected_size(blob)
        if size is None or size > CHUNK_BYTES_MAX:
            raise web.HTTPConflict(text="not asked for")
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                data = await receive(request, blob, size, link)
        except (PeerError, OSError, aiohttp.ClientError, web.RequestPayloadError) as error:
            if isinstance(error, PayloadError):
                self._scores.blame(link.node_id, str(error), Offence.CHUNK)
            # Flipped bits that TLS rejects, or a line that broke, are not worth a traceback in our log.
            self._chunks.chunk_failed(link, blob)
            raise web.HTTPBadRequest(text=str(error)) from None
        if not await self._chunks.chunk_arrived(blob, data):
            self._chunks.chunk_failed(link, blob)
            raise web.HTTPInsufficientStorage(text="cannot store it now")
        return web.Response(status=204)


# --- The chunks on our disk, as exchanged over links: read when asked for, stored as they arrive.


class LocalChunks:
    """The transport's `Chunks`, for one daemon."""

    def __init__(
        self,
        chunks: ChunkStore,
        disk: Disk,
        shelf: SnapshotShelf,
        core: Replica,
        dispatch: Callable[[ev.Event], object],
        damaged: Callable[[bytes], None],
    ) -> None:
        """`damaged` is called with the hash of a chunk that turned out damaged on disk."""
        self._chunks = chunks
        self._disk = disk
        self._shelf = shelf
        self._core = core
        self._dispatch = dispatch
        self._damaged = damaged

    def holds(self, blob: bytes) -> bool:
        """Whether a chunk is here. A snapshot that it is part of counts as used."""
        self._shelf.touch(blob)
        return blob in self._chunks

    async def read_chunk(self, blob: bytes) -> Chunk | None:
        """A chunk from disk, None if it is not here."""
        if not self.holds(blob):
            return None
        try:
            return await asyncio.to_thread(self._chunks.read, blob)
        except MissingChunkError:
            self._damaged(blob)
            return None
        except StorageError as error:
            log.debug("%s", error)
            return None

    def expected_size(self, blob: bytes) -> int | None:
        return self._core.fetcher.expected_size(blob)

    async def can_keep(self) -> bool:
        return await self._disk.writable_within(PATIENCE_S)

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        """Keep a chunk whose hash is right. Returns whether that is done; if not, it is fetched again.

        A chunk that is no longer of use, since what it belongs to was given up meanwhile, is dropped.
        """
        is_wanted = self._core.fetcher.wants.keys_of(blob)
        if is_wanted and not await self._disk.try_write(self._chunks.put, blob, data):
            return False
        self._dispatch(ev.ChunkArrived(blob))
        return True

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        self._dispatch(ev.ChunkFailed(link.number, blob))


_Asked = tuple[bytes, int]
"""A chunk's hash, and the number of its upload."""


class Transfers:
    """Gets chunks from peers that we dialled, and puts chunks to those of them that asked. Over each link
    chunks are put one after another as there is room on the line, the next one while the answer to the one
    before is on its way."""

    def __init__(
        self,
        chunks: Chunks,
        uploads: UploadLimits,
        scores: PeerScores,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._chunks = chunks
        self._uploads = uploads
        self._scores = scores
        self._spawn = spawn
        self._asked: dict[int, asyncio.Queue[_Asked]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._getting: dict[int, set[asyncio.Task[None] | None]] = {}
        """The tasks that get chunks, for each link that is up."""

    async def get(self, link: PeerLink, effect: fx.Get) -> None:
        """Fetch one chunk, unless it could not be kept, and report the outcome to the core.

        The fetch ends with the link. Otherwise a peer that never answers and links to us again and again
        could take up all connections.
        """
        getting, task = self._getting.get(link.number), asyncio.current_task()
        if getting is not None:
            getting.add(task)
            try:
                data = await self._get(link, effect) if await self._chunks.can_keep() else None
            finally:
                getting.discard(task)
            if data is not None:  # from here on the end of the link makes no difference
                await self._chunks.chunk_arrived(effect.blob, data)
        self._chunks.chunk_failed(link, effect.blob)

    async def _get(self, link: PeerLink, effect: fx.Get) -> bytes | None:
        """A chunk from a peer, None if it does not come."""
        try:
            async with asyncio.timeout(effect.patience):
                return await get_chunk(link, effect.blob, effect.size)
        except PayloadError as error:
            self._scores.blame(link.node_id, str(error), Offence.CHUNK)
        except PeerError as error:
            log.debug("%s", error)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("fetching from %s: %s", short(link.node_id), error)
        return None

    async def ask(self, link: PeerLink, question: Want) -> None:
        """Have a peer that dialled us put a chunk, unless it could not be kept."""
        if await self._chunks.can_keep():
            link.send(encode(question))
        else:
            self._chunks.chunk_failed(link, question.blob)

    def begin(self, link: PeerLink) -> None:
        """From now on, get chunks from a peer that we dialled, and put to it what it asks for."""
        self._getting[link.number] = set()
        self._asked[link.number] = asyncio.Queue(ASKS_PER_LINK_MAX)
        self._serving[link.number] = self._spawn(self._serve(link, self._asked[link.number]))

    def end(self, number: int) -> None:
        """Stop putting the chunks that a link's peer asked for."""
        self._asked.pop(number, None)
        serving = self._serving.pop(number, None)
        if serving is not None:
            serving.cancel()

    def gone(self, number: int) -> None:
        """A link has ended: stop getting chunks over it as well."""
        self.end(number)
        for task in self._getting.pop(number, ()):
            if task is not None:
                task.cancel()

    def asked(self, link: PeerLink, blob: bytes) -> None:
        """A peer that we dialled asks for a chunk: queue it, or decline."""
        queue = self._asked.get(link.number)
        upload = None if queue is None or queue.full() else self._uploads.begin(link.node_id, blob)
        if queue is None or upload is None:
            link.send(encode(Decline(blob)))
        else:
            queue.put_nowait((blob, upload))

    async def _serve(self, link: PeerLink, asked: asyncio.Queue[_Asked]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(PUTS_PER_LINK_MAX):
                group.create_task(self._serve_each(link, asked))

    async def _serve_each(self, link: PeerLink, asked: asyncio.Queue[_Asked]) -> None:
        while True:
            blob, upload = await asked.get()
            try:
                sent = await self._put(link, blob)
            finally:
                self._uploads.end(upload)
            if sent < SMALL_CHUNK_BYTES:
                await asyncio.sleep(self._scores.gave_little(link.node_id))

    async def _put(self, link: PeerLink, blob: bytes) -> int:
        """Send a chunk, or decline; returns the number of bytes sent."""
        chunk = None
        try:
            if not self._chunks.holds(blob):
                raise MissingChunkError(blob)
            turn = await self._uploads.uplink.turn(link)
            try:
                chunk = await self._chunks.read_chunk(blob)
                if chunk is None:
                    raise MissingChunkError(blob)
                await put_chunk(link, blob, chunk, turn)
            finally:
                turn.end()
        except (BusyError, PeerError, MissingChunkError, OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("sending to %s: %s", short(link.node_id), error)
            link.send(encode(Decline(blob)))
        return len(chunk.as_it_travels) if chunk else 0
