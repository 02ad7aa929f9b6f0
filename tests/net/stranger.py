"""A peer made for tests: it shakes hands like any node, and then sends what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.sockets import client_context, fingerprint_of
from gossamer.protocol.access.handshake import ClientHandshake
from gossamer.protocol.identity import Identity
from tests.protocol.builders import turns_nobody_away


@dataclass(slots=True)
class Stranger:
    """The dialler's end of an authenticated link."""

    identity: Identity
    node_id: bytes
    session: bytes
    socket: aiohttp.ClientWebSocketResponse
    http: aiohttp.ClientSession
    base_url: str


@contextlib.asynccontextmanager
async def linked(
    address: str,
    swarm_id: bytes,
    identity: Identity | None = None,
    *,
    tls: bool = True,
    credential: bytes = b"",
) -> AsyncIterator[Stranger]:
    """Dial a node and shake hands with it. Raises PeerError, or TypeError if it hangs up."""
    identity = identity or Identity.from_seed(os.urandom(32))
    base_url = f"{'https' if tls else 'http'}://{address}{PREFIX}"
    connector = aiohttp.TCPConnector(ssl=client_context() if tls else False)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.ws_connect(f"{base_url}/link", compress=0) as socket,
    ):
        certificate = socket.get_extra_info("ssl_object")
        binding = fingerprint_of(certificate.getpeercert(binary_form=True)) if certificate else b""
        nonce = os.urandom(32)
        shake = ClientHandshake(
            identity, swarm_id, binding, nonce, None, credential=credential, vet=turns_nobody_away
        )
        await socket.send_bytes(shake.hello(await socket.receive_bytes()))
        node_id, session = shake.finish(await socket.receive_bytes())
        yield Stranger(identity, node_id, session, socket, http, base_url)
    await asyncio.sleep(0.05)  # aiohttp closes TLS connections a little later
