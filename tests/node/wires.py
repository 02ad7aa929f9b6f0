"""Two nodes' networks on loopback, over a core, a disk and an access list that record what each is told."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
from aiohttp import web

from gossamer.node.daemon.network.chunk_transfer import ChunkTransfer, UploadLimits, put_chunk
from gossamer.node.daemon.network.links import PREFIX, Dialler, LinkTable, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.rpc import RpcServer
from gossamer.node.daemon.network.server import Server
from gossamer.node.daemon.network.sockets import Certificate, LocalNode
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.node.daemon.storage.packing import Packing
from gossamer.protocol import events as ev
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.errors import RefusedError, SignatureError
from gossamer.protocol.payloads import Chunk, pack_chunk
from tests.node.trainer_side import until
from tests.protocol.builders import SMALL, identity

Ends = tuple["End", "End"]
"""Who dials, and who listens."""

Pair = tuple["End", "End", PeerLink, PeerLink]
"""The same, and either one's side of their link."""


class _Store(dict[bytes, bytes]):
    """Chunks in memory, and the encoded form in which some of them are sent, correct or not."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: dict[bytes, bytes] = {}
        self.arrived: dict[bytes, bytes] = {}
        self.stock = Stock(1 << 40, 0)
        self.packing = Packing()

    def length(self, blob: bytes) -> int:
        return len(self.get(blob, b""))

    def to_send(self, blob: bytes, rate: float) -> Chunk:
        if blob not in self:
            raise MissingChunkError(blob)
        return Chunk(self[blob], self.frames[blob] if blob in self.frames else pack_chunk(self[blob]))

    def put(self, blob: bytes, data: bytes, *, is_read_next: bool) -> None:
        self.arrived[blob] = data


class _Links(LinkTable):
    """Records links as they come and go, and the messages that they carry."""

    end: End

    async def carry(self, link: PeerLink) -> None:
        link.end = self.end  # type: ignore[attr-defined]
        self.end.links.append(link)
        try:
            await super().carry(link)
        finally:
            self.end.gone.append(link)

    async def _receive(self, link: PeerLink, data: bytes) -> None:
        await self.end.message(link, data)


def fresh_certificate() -> Certificate:
    """A certificate that is not kept."""
    with TemporaryDirectory() as folder:
        return Certificate.of(Path(folder) / "tls.pem")


class End:
    """One node's network, and a node behind it that records everything."""

    def __init__(self, number: int, *, tls: bool = True, swarm_id: bytes = SMALL.swarm_id) -> None:
        self.identity = identity(number)
        self.tls = tls
        self.local = LocalNode(self.identity, swarm_id, fresh_certificate() if tls else None)
        self.answers_anyone = True
        self.is_stopping = False
        self.disk_is_full = False
        self.refused: dict[bytes, str] = {}
        """Node ids that this end's access list refuses, and why."""
        self.credential = b""
        self.shown: list[tuple[bytes, bytes]] = []
        self.delivered: list[bytes] = []
        self.links: list[PeerLink] = []
        self.gone: list[PeerLink] = []
        self.messages: list[bytes] = []
        self.events: list[ev.Event] = []
        self.failed: list[tuple[PeerLink, bytes]] = []
        self.damaged: list[bytes] = []
        self.wanted: dict[bytes, int] = {}
        self.address = ""
        self.dials: list[asyncio.Task[None]] = []

        this: Any = self
        self.store: Any = _Store()
        self.frames, self.arrived = self.store.frames, self.store.arrived
        self.chunks: dict[bytes, bytes] = self.store
        wants = SimpleNamespace(keys_of=lambda blob: (b"key",))
        self.core: Any = SimpleNamespace(
            fetcher=SimpleNamespace(expected_size=self.wanted.get, wants=wants),
        )
        self.scores = PeerScores()
        own_addresses: Any = SimpleNamespace(learn=lambda name: None)
        self.writer: Any = SimpleNamespace(has_room=True)
        self.table = _Links(self.scores, own_addresses, self.writer, self.dispatch)
        self.table.end = self
        self.dialler = Dialler(self.local, this, self.table, self.dispatch)
        shelf: Any = SimpleNamespace(touch=lambda blob: None)
        self.transfers = ChunkTransfer(
            self.table, self.store, shelf, this, self.core, self.dispatch, self.damaged.append
        )
        self.rpc = RpcServer(self.local, SMALL.canonical(), this, self.status)
        self.server = Server(self.local, self.table, this, self.rpc, self.transfers)

    # -- the core

    def dispatch(self, event: ev.Event) -> list[Any]:
        self.events.append(event)
        if isinstance(event, ev.ChunkFailed):
            link = next(link for link in self.links if link.number == event.link)
            self.failed.append((link, event.blob))
        return []

    async def message(self, link: PeerLink, data: bytes) -> None:
        self.messages.append(data)

    # -- the access list

    def own_credential(self) -> bytes:
        return self.credential

    def vet(self, node_id: bytes, credential: bytes) -> None:
        self.shown.append((node_id, credential))
        if node_id in self.refused:
            raise RefusedError(self.refused[node_id])

    vet_question = vet

    def deliver(self, credential: bytes) -> None:
        if not credential.startswith(b"good"):
            raise SignatureError("no owner signed this")
        self.delivered.append(credential)

    # -- the disk

    async def writable(self, seconds: float) -> bool:
        return not self.disk_is_full

    async def try_write(self, work: Any, *arguments: object, **options: object) -> bool:
        if not self.disk_is_full:
            work(*arguments, **options)
        return not self.disk_is_full

    async def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {"swarm_id": "", "node_id": self.identity.node_id.hex(), **query}

    # -- what tests do

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        port = await self.server.start(host, port)
        self.dialler.start(self.server.bound_to)
        return port

    async def stop(self) -> None:
        await self.server.stop()
        await self.dialler.stop()

    def hold(self, data: bytes) -> bytes:
        """Put a chunk on the fake disk; returns its hash."""
        blob = sha256(data).digest()
        self.chunks[blob] = data
        return blob

    def dial(
        self, other: End | str, expected: bytes | None = None, fingerprint: bytes = b""
    ) -> asyncio.Task[None]:
        async def dial() -> None:
            address = other if isinstance(other, str) else other.address
            await self.table.carry(await self.dialler.connect(address, expected, fingerprint))

        task = asyncio.create_task(dial())
        self.dials.append(task)
        return task


@contextlib.asynccontextmanager
async def listening(*ends: End) -> AsyncIterator[None]:
    for end in ends:
        end.address = f"127.0.0.1:{await end.start()}"
    try:
        yield
    finally:
        for end in ends:
            await end.stop()
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


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A server that is no node, and answers any GET in one way; its address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def answering(path: str, answer: Callable[[], bytes], status: int = 200) -> AsyncIterator[str]:
    """A plain HTTP server with one page below PREFIX; its address."""

    async def handler(request: web.Request) -> web.Response:
        if request.path != f"{PREFIX}/{path}":
            raise web.HTTPNotFound
        return web.Response(body=answer(), status=status)

    async with serving(handler) as address:
        yield address


async def get_chunk(link: Any, blob: bytes, size: int) -> bytes:
    """Get a chunk over a link that was dialled."""
    transfers: ChunkTransfer = link.end.transfers
    return await transfers.get_chunk(link, blob, size)


async def put(link: PeerLink, blob: bytes, data: bytes) -> None:
    """Put a chunk over a line that nothing else uses."""
    async with UploadLimits().place(link.uploads) as upload:
        await put_chunk(link, blob, Chunk(data, pack_chunk(data)), upload)
