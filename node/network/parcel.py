"""A chunk as the body of an answer or a request, packed or as it is, in both directions.

Only the length and the hash of a received chunk are checked here.
"""

from hashlib import sha256

import aiohttp
from aiohttp import web

from gossamer.node.network.link import PeerLink
from gossamer.protocol.errors import PayloadError, RefusedError
from gossamer.protocol.identity import short
from gossamer.protocol.payloads.packing import Chunk, packed_size, unpack_chunk

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
