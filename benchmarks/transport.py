"""What TLS and the hello cost: handshake time, and chunks per second, over TLS and in plaintext.

Server and client are separate processes on loopback, so processors limit the figures, not a line. TLS and
plaintext take turns in one run: compare these two, not one of them with a figure of another day.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.tables import Table
from gossamer.node.daemon.network.chunk_transfer import ChunkRoutes, get_chunk
from gossamer.node.daemon.network.links import PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import RpcServer, Server
from gossamer.node.daemon.network.tls import Certificate
from gossamer.node.daemon.network.upload_limits import UploadLimits
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads.chunks import Chunk

SWARM = sha256(b"a swarm for a benchmark").digest()
HANDSHAKES = 15
"""How many links are made. A node lets one key link 20 times in a row, and then only now and then."""

CHUNK = bytes(range(256)) * (CHUNK_BYTES_MAX // 256)
CHUNK_HASH = sha256(CHUNK).digest()


class _Node:
    """A node that lets everybody in and has one chunk."""

    answers_anyone = True
    is_stopping = False

    def __init__(self, *, tls: bool) -> None:
        self.came: asyncio.Queue[PeerLink] = asyncio.Queue(64)
        certificate = Certificate.fresh() if tls else None
        identity = Identity.from_seed(os.urandom(32))
        fingerprint = certificate.fingerprint if certificate else b""
        questions = RpcServer(identity, SWARM, fingerprint, b"", self, self.status)
        scores = PeerScores()
        routes = ChunkRoutes(self, scores, UploadLimits())
        self.transport = Server(identity, SWARM, self, self, questions, routes, certificate, scores)

    def own_credential(self) -> bytes:
        return b""

    def vet(self, node_id: bytes, credential: bytes) -> None:
        pass

    vet_question = vet

    def deliver(self, credential: bytes) -> None:
        pass

    def link_up(self, link: PeerLink) -> None:
        with suppress(asyncio.QueueFull):
            self.came.put_nowait(link)

    def link_down(self, link: PeerLink) -> None:
        pass

    async def message(self, link: PeerLink, data: bytes) -> None:
        pass

    def expected_size(self, blob: bytes) -> int | None:
        return len(CHUNK) if blob == CHUNK_HASH else None

    async def can_keep(self) -> bool:
        return True

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        return True

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        pass

    def holds(self, blob: bytes) -> bool:
        return blob == CHUNK_HASH

    async def read_chunk(self, blob: bytes) -> Chunk | None:
        return Chunk(CHUNK, None)

    async def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {}


def _serve(pipe: Connection) -> None:
    """The server's process: one port with TLS and one without, until told to stop."""

    async def serve() -> None:
        nodes = [_Node(tls=True), _Node(tls=False)]
        pipe.send([await node.transport.start("127.0.0.1", 0) for node in nodes])
        await asyncio.to_thread(pipe.recv)
        for node in nodes:
            await node.transport.stop()

    asyncio.run(serve())


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def _connect(node: _Node, port: int) -> tuple[PeerLink, asyncio.Task[None]]:
    dial = asyncio.create_task(node.transport.dial(f"127.0.0.1:{port}", None))
    async with asyncio.timeout(10):
        return await node.came.get(), dial


async def _measure(ports: list[int], handshakes: int, chunks: int) -> list[dict[str, Any]]:
    nodes = [_Node(tls=True), _Node(tls=False)]
    hello_s: list[list[float]] = [[], []]
    get_s: list[list[float]] = [[], []]
    for node in nodes:
        await node.transport.start("127.0.0.1", 0)
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
            for (link, _), times in zip(links, get_s, strict=True):
                times.append(await _timed(lambda k=link: get_chunk(k, CHUNK_HASH, len(CHUNK))))  # type: ignore[misc]
        for link, dial in links:
            link.close_soon()
            await dial
    finally:
        for node in nodes:
            await node.transport.stop()
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
