"""Two transports on loopback, and a record of what each received."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from hashlib import sha256
from typing import Any

import psutil

from gossamer.node.daemon.network.chunk_transfer import ChunkRoutes, put_chunk
from gossamer.node.daemon.network.links import PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import RpcServer, Server
from gossamer.node.daemon.network.tls import Certificate
from gossamer.node.daemon.network.upload_limits import Uplink, UploadLimits
from gossamer.protocol.errors import RefusedError, SignatureError
from gossamer.protocol.payloads.chunks import Chunk
from tests.node.trainer_side import until
from tests.protocol.builders import SMALL, identity


class End:
    """One node's transport, and a node behind it that records everything."""

    def __init__(self, number: int, *, tls: bool = True, swarm_id: bytes = SMALL.swarm_id) -> None:
        self.identity = identity(number)
        certificate = Certificate.fresh() if tls else None
        self.tls = tls
        self.scores = PeerScores()
        fingerprint = certificate.fingerprint if certificate else b""
        self.questions = RpcServer(self.identity, swarm_id, fingerprint, SMALL.canonical(), self, self.status)
        routes = ChunkRoutes(self, self.scores, UploadLimits())
        self.transport = Server(
            self.identity, swarm_id, self, self, self.questions, routes, certificate, self.scores
        )
        self.answers_anyone = True
        self.is_stopping = False
        self.disk_is_full = False
        self.turned_away: dict[bytes, str] = {}
        """Node ids that this end turns away at every door, and why."""
        self.credential = b""
        self.shown: list[tuple[bytes, bytes]] = []
        self.delivered: list[bytes] = []
        self.links: list[PeerLink] = []
        self.gone: list[PeerLink] = []
        self.messages: list[bytes] = []
        self.chunks: dict[bytes, bytes] = {}
        self.frames: dict[bytes, bytes] = {}
        """The encoded form in which some chunks are sent, correct or not."""
        self.wanted: dict[bytes, int] = {}
        self.arrived: dict[bytes, bytes] = {}
        self.failed: list[tuple[PeerLink, bytes]] = []
        self.address = ""
        self.dials: list[asyncio.Task[None]] = []

    # -- the transport's Receiver, Chunks and Admission

    def link_up(self, link: PeerLink) -> None:
        self.links.append(link)

    def link_down(self, link: PeerLink) -> None:
        self.gone.append(link)

    async def message(self, link: PeerLink, data: bytes) -> None:
        self.messages.append(data)
        self.scores.heard(link, len(data), 0.0, 0)

    def own_credential(self) -> bytes:
        return self.credential

    def vet(self, node_id: bytes, credential: bytes) -> None:
        self.shown.append((node_id, credential))
        if node_id in self.turned_away:
            raise RefusedError(self.turned_away[node_id])

    def vet_question(self, node_id: bytes, credential: bytes) -> None:
        self.vet(node_id, credential)

    def deliver(self, credential: bytes) -> None:
        if not credential.startswith(b"good"):
            raise SignatureError("no owner signed this")
        self.delivered.append(credential)

    def expected_size(self, blob: bytes) -> int | None:
        return self.wanted.get(blob)

    async def can_keep(self) -> bool:
        return True

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        self.arrived[blob] = data
        return not self.disk_is_full

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        self.failed.append((link, blob))

    def holds(self, blob: bytes) -> bool:
        return blob in self.chunks

    async def read_chunk(self, blob: bytes) -> Chunk | None:
        if blob in self.frames:
            return Chunk(self.chunks[blob], self.frames[blob])
        return Chunk.of(self.chunks[blob]) if blob in self.chunks else None

    async def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {"swarm_id": "", "node_id": self.identity.node_id.hex(), **query}

    # -- what tests do

    def hold(self, data: bytes) -> bytes:
        """Put a chunk on the fake disk; returns its hash."""
        blob = sha256(data).digest()
        self.chunks[blob] = data
        return blob

    def dial(
        self, other: End | str, expected: bytes | None = None, fingerprint: bytes = b""
    ) -> asyncio.Task[None]:
        address = other if isinstance(other, str) else other.address
        task = asyncio.create_task(self.transport.dial(address, expected, fingerprint))
        self.dials.append(task)
        return task


@contextlib.asynccontextmanager
async def listening(*ends: End) -> AsyncIterator[None]:
    for end in ends:
        end.address = f"127.0.0.1:{await end.transport.start('127.0.0.1', 0)}"
    try:
        yield
    finally:
        for end in ends:
            await end.transport.stop()
        await asyncio.gather(*(task for end in ends for task in end.dials), return_exceptions=True)
        for end in ends:
            await hung_up(int(end.address.rpartition(":")[2]))


def connections_to(port: int) -> int:
    """How many connections to a port of this machine this process has."""
    connections = psutil.Process().net_connections("tcp")
    return sum(connection.raddr[1:] == (port,) for connection in connections)


async def hung_up(port: int) -> None:
    """Wait until this process has no connection to a port any more: TLS ends a little after `close`."""
    await until(lambda: not connections_to(port))


async def linked(dialler: End, listener: End) -> tuple[PeerLink, PeerLink]:
    """Link two ends; returns the dialler's and the listener's side."""
    dialler.dial(listener, listener.identity.node_id)
    await until(lambda: dialler.links and listener.links)
    return dialler.links[-1], listener.links[-1]


async def put(link: PeerLink, blob: bytes, data: bytes) -> None:
    """Put a chunk over a line that nothing else uses."""
    turn = await Uplink().turn(link)
    try:
        await put_chunk(link, blob, Chunk.of(data), turn)
    finally:
        turn.end()
