"""Chunks over HTTP, from our side: getting them from a peer that we dialled, and putting them to it.

`chunk_routes` is the other end.
"""

from email.utils import formatdate

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from gossamer.node.network.guest import WRITE_BUFFER_BYTES
from gossamer.node.network.link import SESSION_HEADER, Dialled, PeerLink
from gossamer.node.network.parcel import headers_of, receive
from gossamer.node.network.uplink import Turn
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.identity import short
from gossamer.protocol.limits import FETCH_TIMEOUT_S, FETCHES_PER_LINK_MAX
from gossamer.protocol.payloads.packing import Chunk

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
