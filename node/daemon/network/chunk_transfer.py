"""Chunks over HTTP, both ways, as the core has scheduled them (`Get`, `Put`, `Want`).

Whoever has dialled makes the requests: it gets chunks from its peer, and puts to it what the peer asks for.
`serve` and `take` are the other end of both. A body is a chunk as it travels, packed or as it is. Here only
its length and its hash are checked. While the disk takes nothing, nothing is fetched.
"""

import asyncio
import logging
from collections.abc import Callable
from email.utils import formatdate
from hashlib import sha256

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from gossamer.node.daemon.network.links import SESSION_HEADER, Dialled, LinkTable, PeerLink
from gossamer.node.daemon.network.tls import WRITE_BUFFER_BYTES, cut
from gossamer.node.daemon.network.upload_limits import BusyError, Upload, UploadLimits
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
    DECLINED_MISSES,
    FETCH_TIMEOUT_S,
    FETCHES_PER_LINK_MAX,
    SMALL_CHUNK_BYTES,
)
from gossamer.protocol.messages import Decline, Want, encode
from gossamer.protocol.payloads import Chunk, packed_size, unpack_chunk
from gossamer.protocol.replica import Replica

ENCODING_HEADER = "Content-Encoding"
ZSTD = "zstd"

READ_PIECE_BYTES = 256 * 1024
"""Bodies are read in pieces of this size: the fastest as measured on loopback, and a bound on buffering."""

GET_TIMEOUT = aiohttp.ClientTimeout(total=FETCHES_PER_LINK_MAX * FETCH_TIMEOUT_S)
"""A peer sends one chunk after another. The core decides how long each is worth waiting for, up to this."""

DISK_PATIENCE_S = 2.0
"""For the disk to be writable. Less than FETCH_OVERDUE_S: a peer that was not even asked must not pass for a
slow one."""

log = logging.getLogger("gossamer.chunk_transfer")


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

    async def ask(self, link: PeerLink, want: Want) -> None:
        """Have a peer that dialled us put a chunk, unless it could not be kept."""
        if await self._disk.writable(DISK_PATIENCE_S):
            link.send(encode(want))
        else:
            self._dispatch(ev.ChunkFailed(link.number, want.blob))

    async def take(self, link: PeerLink, request: web.Request) -> web.Response:
        """A peer puts a chunk that we asked it for."""
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
            return await self._receive(response, blob, size, link)

    async def _receive(
        self, message: aiohttp.ClientResponse | web.BaseRequest, blob: bytes, size: int, link: PeerLink
    ) -> bytes:
        """Read a chunk of at most `size` bytes that hashes to `blob`.

        Raises PayloadError for another chunk, an offence; RefusedError for a longer one, which is none: a
        record may have lied about the size of somebody else's chunk.
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
            self._store.put, blob, data
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
                    chunk = await self._read(blob)
                    await put_chunk(link, blob, chunk, upload)
                    return len(chunk.as_it_travels)
        except (BusyError, PeerError, MissingChunkError, OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("sending to %s: %s", short(link.node_id), error)
            link.send(encode(Decline(blob)))
            return 0

    async def serve(self, link: PeerLink, request: web.Request) -> web.StreamResponse:
        """A peer gets a chunk, unless it is not here (then it waits for no place), or we are busy. The next
        request on the same connection begins only when this one has returned."""
        blob = bytes.fromhex(request.match_info["hash"])
        try:
            self._check_here(blob)
            with self._limits.counted(link.node_id, blob):
                async with self._limits.place(link.uploads) as upload:
                    if link.is_closing or request.transport is None or request.transport.is_closing():
                        raise web.HTTPForbidden(text="nobody waits for it any more")
                    chunk = await self._read(blob)
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
        except BusyError as error:  # the answer sends the peer to other holders
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

    async def _read(self, blob: bytes) -> Chunk:
        """Raises MissingChunkError."""
        self._check_here(blob)
        try:
            return await asyncio.to_thread(self._store.read, blob)
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
    way, body = _way_of(link), chunk.as_it_travels
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
    return {} if chunk.frame is None else {ENCODING_HEADER: ZSTD}


def _way_of(link: PeerLink) -> Dialled:
    assert link.dialled is not None, "the core asks those who dialled us to put"
    return link.dialled
