"""Chunks over HTTP, from our side: getting them from a peer that we dialled, and putting them to it.

`chunk_routes` is the other end.
"""

import time

from gossamer.node.network.chunk_routes import read_body
from gossamer.node.network.clocks import offset_of
from gossamer.node.network.link import SESSION_HEADER, Dialled, PeerLink
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.identity import short


async def get_chunk(link: PeerLink, blob: bytes, size: int) -> bytes:
    """Fetch a chunk. Raises PeerError, OSError or aiohttp.ClientError."""
    way = _way_of(link)
    async with way.http.get(
        f"{way.base_url}/chunk/{blob.hex()}",
        headers={SESSION_HEADER: link.session.hex()},
        ssl=way.ssl,
        allow_redirects=False,
    ) as response:
        link.clock_offset_s = offset_of(response.headers.get("Date"), time.time())
        if response.status != 200:
            raise RefusedError(f"{short(link.node_id)} does not have chunk {short(blob)}")
        return await read_body(response.content, blob, size, link)


async def put_chunk(link: PeerLink, blob: bytes, data: bytes) -> None:
    """Send a chunk. Raises PeerError, OSError or aiohttp.ClientError."""
    way = _way_of(link)
    async with way.http.put(
        f"{way.base_url}/chunk/{blob.hex()}",
        data=data,
        headers={SESSION_HEADER: link.session.hex()},
        ssl=way.ssl,
        allow_redirects=False,
    ) as response:
        if response.status != 204:
            raise RefusedError(f"{short(link.node_id)} did not take chunk {short(blob)}")
    link.traffic.payload_sent += len(data)


def _way_of(link: PeerLink) -> Dialled:
    assert link.dialled is not None, "the core asks those who dialled us to put"
    return link.dialled
