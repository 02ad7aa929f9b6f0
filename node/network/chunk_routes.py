"""Chunks over HTTP: the routes by which linked peers get and put them.

`Chunks` knows which chunks are here and which are wanted. `chunk_requests` is the other end.
"""

import asyncio
import logging

import aiohttp
from aiohttp import web

from gossamer.node.network.link import PeerLink
from gossamer.node.network.parcel import headers_of, receive
from gossamer.node.network.policing import Policing
from gossamer.node.network.receiver import Chunks
from gossamer.node.network.tls import cut
from gossamer.node.network.uplink import BusyError, Turn
from gossamer.node.network.uploads import Uploads
from gossamer.protocol.errors import PayloadError, PeerError
from gossamer.protocol.identity import short
from gossamer.protocol.limits import CHUNK_BYTES_MAX, FETCH_TIMEOUT_S, SMALL_CHUNK_BYTES
from gossamer.protocol.offence import Offence
from gossamer.protocol.payloads.packing import Chunk

log = logging.getLogger("gossamer.transport")


class ChunkRoutes:
    """The server's side, for requests that belong to a link."""

    def __init__(self, chunks: Chunks, policing: Policing, uploads: Uploads) -> None:
        self._chunks = chunks
        self._policing = policing
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
            await asyncio.sleep(self._policing.gave_little(link.node_id))
        return response

    async def _busy(self, link: PeerLink) -> web.HTTPServiceUnavailable:
        """The answer that sends a peer to other holders. It comes soon if the peer seldom asks in vain."""
        await asyncio.sleep(self._policing.declined(link.node_id))
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
            log.debug("sending chunk %s: %s", short(link.node_id), error)
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
                self._policing.blame(link.node_id, str(error), Offence.CHUNK)
            # Flipped bits that TLS rejects, or a line that broke, are not worth a traceback in our log.
            self._chunks.chunk_failed(link, blob)
            raise web.HTTPBadRequest(text=str(error)) from None
        if not await self._chunks.chunk_arrived(blob, data):
            self._chunks.chunk_failed(link, blob)
            raise web.HTTPInsufficientStorage(text="cannot store it now")
        return web.Response(status=204)
