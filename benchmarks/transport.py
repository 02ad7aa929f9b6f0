"""What TLS and the hello cost: handshake time, and chunks per second, over TLS and in plaintext.

Server and client are separate processes on loopback, so processors limit the figures, not a line. TLS and
plaintext take turns in one run: compare these two, not one of them with a figure of another day.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.tables import Table
from gossamer.node.daemon.network.chunk_transfer import ChunkTransfer
from gossamer.node.daemon.network.links import Dialler, LinkTable, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.rpc import RpcServer
from gossamer.node.daemon.network.server import Server
from gossamer.node.daemon.network.sockets import LocalNode
from gossamer.node.daemon.storage.packing import Packing
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads import Chunk
from tests.node.wires import fresh_certificate

SWARM = sha256(b"a swarm for a benchmark").digest()
HANDSHAKES = 15
"""How many links are made. A node lets one key link 20 times in a row, and then only now and then."""

CHUNK = bytes(range(256)) * (CHUNK_BYTES_MAX // 256)
CHUNK_HASH = sha256(CHUNK).digest()


class _Links(LinkTable):
    """Links whose messages nobody reads, and a queue of those that come up."""

    came: asyncio.Queue[PeerLink]

    async def carry(self, link: PeerLink) -> None:
        with suppress(asyncio.QueueFull):
            self.came.put_nowait(link)
        await super().carry(link)


class _Store(dict[bytes, bytes]):
    """Chunks in memory."""

    stock = Stock(1 << 60, 0)
    packing = Packing()

    def length(self, blob: bytes) -> int:
        return len(self[blob])

    def to_send(self, blob: bytes, rate: float) -> Chunk:
        return Chunk(self[blob], None)


class _Node:
    """A node that lets everybody in and has one chunk."""

    answers_anyone = True
    is_stopping = False

    def __init__(self, *, tls: bool) -> None:
        local = LocalNode(Identity.from_seed(os.urandom(32)), SWARM, fresh_certificate() if tls else None)
        this: Any = self
        store: Any = _Store({CHUNK_HASH: CHUNK})
        own_addresses: Any = SimpleNamespace(learn=lambda name: None)
        writer: Any = SimpleNamespace(has_room=True)
        shelf: Any = SimpleNamespace(touch=lambda blob: None)
        links = _Links(PeerScores(), own_addresses, writer, lambda event: [])
        self.came = links.came = asyncio.Queue(64)
        self.links = links
        self.chunks = ChunkTransfer(links, store, shelf, this, this, lambda event: [], lambda blob: None)
        self.dialler = Dialler(local, this, links, lambda event: [])
        self.server = Server(local, links, this, RpcServer(local, b"", this, self.status), self.chunks)

    async def start(self) -> int:
        port = await self.server.start("127.0.0.1", 0)
        self.dialler.start(None)
        return port

    async def stop(self) -> None:
        await self.server.stop()
        await self.dialler.stop()

    def own_credential(self) -> bytes:
        return b""

    def vet(self, node_id: bytes, credential: bytes) -> None:
        pass

    async def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {}


def _serve(pipe: Connection) -> None:
    """The server's process: one port with TLS and one without, until told to stop."""

    async def serve() -> None:
        nodes = [_Node(tls=True), _Node(tls=False)]
        pipe.send([await node.start() for node in nodes])
        await asyncio.to_thread(pipe.recv)
        for node in nodes:
            await node.stop()

    asyncio.run(serve())


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def _connect(node: _Node, port: int) -> tuple[PeerLink, asyncio.Task[None]]:
    async def connect() -> None:
        await node.links.carry(await node.dialler.connect(f"127.0.0.1:{port}", None))

    dial = asyncio.create_task(connect())
    async with asyncio.timeout(10):
        return await node.came.get(), dial


async def _measure(ports: list[int], handshakes: int, chunks: int) -> list[dict[str, Any]]:
    nodes = [_Node(tls=True), _Node(tls=False)]
    hello_s: list[list[float]] = [[], []]
    get_s: list[list[float]] = [[], []]
    for node in nodes:
        await node.start()
    try:
        for _ in range(handshakes):
            for node, port, times in zip(nodes, ports, hello_s, strict=True):
                begun = time.perf_counter()
                link, dial = await _connect(node, port)
                times.append(time.perf_counter() - begun)
                link.close_soon()
                await dial
        links = [await _connect(node, port) for node, port in zip(nodes, ports, strict=True)]
        for _ in range(chunks):
            for node, (link, _), times in zip(nodes, links, get_s, strict=True):
                get = partial(node.chunks.get_chunk, link, CHUNK_HASH, len(CHUNK))
                times.append(await _timed(get))
        for link, dial in links:
            link.close_soon()
            await dial
    finally:
        for node in nodes:
            await node.stop()
    return [
        {
            "channel": name,
            "handshake_ms": 1000 * median(hello),
            "chunk_bytes_per_s": len(CHUNK) / median(get),
        }
        for name, hello, get in zip(("TLS 1.3", "plaintext"), hello_s, get_s, strict=True)
    ]


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure both channels in turns: one row each."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        rows = asyncio.run(_measure(ours.recv(), *((5, 20) if quick else (HANDSHAKES, 400))))
    finally:
        ours.send("stop")
        server.join(10)
    return rows


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Handshakes and chunks, by channel."""
    lines = [
        (row["channel"], f"{row['handshake_ms']:.1f} ms", f"{row['chunk_bytes_per_s'] / 1e6:,.0f} MB/s")
        for row in rows
    ]
    title = "one handshake (connection, TLS, hello both ways); chunks of 1 MiB over one link"
    return [Table(title, ("channel", "handshake", "chunks"), lines)]
